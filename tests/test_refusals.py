"""The page of refusals has every `raise UnsupportedError(...)` of the integrations, with the names of what it tells."""

from __future__ import annotations

from pathlib import Path

from docs import reference

ROOT = Path(__file__).parents[1]


def test_the_page_has_every_statement_with_the_names_of_what_it_tells() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    for framework in reference.FRAMEWORKS:
        lines = reference.refusals(framework)
        calls = sum(len(calls) for *_, calls in reference.statements(framework))
        assert "\n".join(lines) in page
        assert 0.8 * calls <= sum(line.startswith("- ") for line in lines) < 2 * calls
    assert "{asked}" not in page
    assert "{Starred" not in page
    for row in (
        "- mesh_param with dist_flash_attention\n",
        "- a sequence on {size} of {ranks} ranks\n",
        "- sparse_gradients={value} with dist_flash_attention\n",  # of a dictionary
        "- mtp_hsm={value}\n",
        "- the mixer {base.__name__} where tokens are in order\n",  # its other texts are a constant pair
    ):
        assert row in page, row
