"""The page of refusals has every `raise UnsupportedError(...)` of the integrations, with the names of what it tells."""

from __future__ import annotations

from pathlib import Path

from docs import refusal_tables
from tests.support.reached import FRAMEWORKS

ROOT = Path(__file__).parents[1]


def test_the_page_has_every_statement_with_the_names_of_what_it_tells() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    for framework in FRAMEWORKS:
        table = refusal_tables.of_statements(framework)
        calls = sum(len(calls) for *_, calls in refusal_tables.statements(framework))
        rows = [line for line in table if line.startswith("| ") and "| refused |" not in line]
        assert "\n".join(table) in page
        assert calls <= len(rows) < 2 * calls
    assert "{asked}" not in page
    assert "{Starred" not in page
    for row in (
        "| mesh_param with dist_flash_attention | DeepSpeed's mesh does not reduce",  # a constant of the package
        "| a sequence on {size} of {ranks} ranks | every rank belongs to one group of that size | size {divisors} |",
        "| sparse_gradients={value} with dist_flash_attention | no test compares its gradients",  # of a dictionary
        "| mtp_hsm={value} over several context-parallel ranks | it shifts hidden states over the ranks",
        "| the mixer {base.__name__} where tokens are in order | it is neither Megatron's MambaMixer",  # a pair
    ):
        assert row in page, row
