"""Every row of the tables of refusals: its example is refused by it, needs every fact, and stands in the docs."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.refusals import Asked, Refusal, Stage
from docs import refusal_tables, update

pytest.importorskip("megatron.core")

from dfa_megatron.deepspeed.tested_keys import REFUSED
from dfa_megatron.megatron.refusals import STAGES

ROOT = Path(__file__).parents[1]
ROWS = [pytest.param(stage, row, id=f"{stage.title}-{n}") for stage in STAGES for n, row in enumerate(stage.rows)]


def asked_of(stage: Stage, facts: Any) -> tuple[Any, ...]:
    """Return the example as a framework hands it to the stage: options, then facts."""
    options = {name.removeprefix("dfa_"): value for name, value in facts.items() if name.startswith("dfa_")}
    known = {name: value for name, value in options.items() if name in DistAttentionConfig.__dataclass_fields__}
    return stage.options.replace(**known), facts


def first_error(stage: Stage, facts: Any) -> str | None:
    asked = Asked(*asked_of(stage, facts))
    return next((str(row.error(asked)) for row in stage.rows if row.applies(asked)), None)


@pytest.mark.support("megatron", "what is not supported is refused by name")
@pytest.mark.parametrize(("stage", "row"), ROWS)
def test_the_example_of_a_row_is_refused_by_it_and_every_fact_of_it_is_needed(stage: Stage, row: Refusal) -> None:
    with pytest.raises(UnsupportedError) as refused:
        stage.check(*asked_of(stage, row.example))
    said = first_error(stage, row.example)
    assert said == str(refused.value) == str(row.error(Asked(*asked_of(stage, row.example))))
    written = row.what + row.why + row.instead
    assert said.count("None") == written.count("None"), "the example leaves out a fact that the error names"
    for name in row.example:
        assert first_error(stage, {other: fact for other, fact in row.example.items() if other != name}) != said


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.title)
def test_a_request_for_nothing_special_passes_every_stage(stage: Stage) -> None:
    stage.check(stage.options)


def test_the_page_of_the_site_has_every_row_and_every_statement_with_the_names_of_what_it_tells() -> None:
    page = update.for_site("refusals", (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8"))
    tables = {"\n".join(refusal_tables.of_megatron()): len(ROWS)}
    for framework, more in (("deepspeed", len(REFUSED) - 1), ("huggingface", 0)):
        calls = sum(len(calls) for *_, calls in refusal_tables.statements(framework))
        tables["\n".join(refusal_tables.of_statements(framework))] = calls + more
    for table, rows in tables.items():
        assert table in page
        assert table.count("\n| ") - table.count("### ") == rows
    assert "{asked}" not in page
    for row in (
        "| mesh_param with dist_flash_attention | DeepSpeed's mesh does not reduce",  # a constant of the package
        "| a sequence on {size} of {ranks} ranks | every rank belongs to one group of that size | size {divisors} |",
        "| sparse_gradients={value} with dist_flash_attention | no test compares its gradients",  # of a dictionary
    ):
        assert row in page


def test_the_integration_with_megatron_refuses_nothing_outside_its_tables() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "dfa_megatron/megatron").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "UnsupportedError"
    ]
    assert found == []
