"""The tables of docs/support.md and docs/trust.md say no more than their results, and every row has tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron import names
from docs import support as script

ROOT = Path(__file__).parents[1]
FLOAT64 = "kernels | float64 | `{}`"
GLOO = "runtime | every schedule and dtype between 2, 3 and 4 processes (gloo) | "
BALANCED = "schedules | `balanced`, contiguous tokens | full"


def test_every_row_of_the_page_has_tests_and_every_marker_a_row(every_test: list[dict[str, Any]]) -> None:
    marked = {cell for test in every_test for cell in test["support"]}
    assert marked <= script.known(), "write the row into docs/support_rows.json"
    folders = {"models": "huggingface"}
    # tests/megatron is not collected without megatron-core.
    installed = {test["id"].split("/")[1] for test in every_test}
    rows = {tuple(cell.split(" | ")[:2]) for cell in marked}
    for table in (*script.GRIDS, *script.PLACES):
        if table in ("kernels", "schedules", "runtime") or folders.get(table, table) in installed:
            assert {(table, row) for row in script.ROWS[table]["rows"]} <= rows


def test_make_quick_names_tests_that_exist(every_test: list[dict[str, Any]]) -> None:
    """pytest runs none of the others where it does not find one."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    words = dict(re.findall(r"^(PLAN|KERNELS) := (.*)$", makefile, re.MULTILINE))
    named = [f"tests/plan/test_{word}.py" for word in words["PLAN"].split()]
    named += [f"tests/kernels/test_kernel_{word}.py" for word in words["KERNELS"].split()]
    named += re.findall(r"tests/\w[^\"\s%$]*\.py(?:::[^\"]+)?", makefile)
    assert len(named) > 20
    ids = [test["id"] for test in every_test]
    there = {*ids, *(each.partition(end)[0] for each in ids for end in ("[", "::"))}
    assert [name for name in named if name not in there] == []


def test_every_kernel_has_a_column() -> None:
    assert {column.strip("`") for column in script.ROWS["kernels"]["columns"]} == set(names.KERNELS) - {"auto"}


def said(*results: tuple[str, str, bool, str], device: str = "CPU", refuses: bool = False) -> list[str]:
    """What `--support-report` writes of these results."""
    head = {"date": "2026-01-02", "device": device, "python": "3.12.0", "versions": {"torch": "2.9"}, "command": "a"}
    tests = [
        {"id": f"tests/a/{n}", "outcome": outcome, "gpu": gpu, "reason": reason, "support": [name], "refuses": refuses}
        for n, (name, outcome, gpu, reason) in enumerate(results)
    ]
    return [json.dumps(line) for line in (head, *tests)]


def reported(*results: tuple[str, str, bool, str], **more: Any) -> dict[str, Any]:
    return script.read(said(*results, **more))


def test_a_skip_is_a_refusal_where_the_kernel_says_so_and_no_result_where_the_machine_lacks_something() -> None:
    run = reported(
        (FLOAT64.format("flash4"), "skipped", True, "Skipped: flash4: it computes bfloat16 and float16"),
        (FLOAT64.format("aten"), "skipped", True, "Skipped: aten: PyTorch is built without CUDA"),
        (FLOAT64.format("triton"), "skipped", True, "Skipped: no CUDA device"),
    )
    cells = [script.cell([run], FLOAT64.format(name)) for name in ("flash4", "aten", "triton")]
    assert cells == ["refused", "GPU: not run", "GPU: not run"]
    gpu = reported((FLOAT64.format("aten"), "passed", True, ""), device="1 x H200")
    assert script.cell([run, gpu], FLOAT64.format("aten")) == "GPU"


def test_a_failure_is_not_hidden_by_tests_that_passed() -> None:
    run = reported((GLOO, "passed", False, ""), (GLOO, "failed", False, ""))
    assert script.seen([run], GLOO, "CPU", "torch") == "**failed**"
    again = reported((GLOO, "passed", False, ""), (GLOO, "passed", False, ""))
    merged = script.merge([run], again)
    assert len(merged) == 1
    assert script.seen(merged, GLOO, "CPU", "torch") == "2.9"


def test_a_test_that_passes_because_of_a_refusal_is_shown_as_one() -> None:
    run = reported((BALANCED, "passed", False, ""), refuses=True)
    assert script.cell([run], BALANCED) == "refused"


def test_results_of_a_row_that_no_table_has_are_not_dropped_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "RESULTS", tmp_path / "support.json")
    script.RESULTS.write_text("[]")
    lines = said((GLOO, "passed", False, ""))
    script.take_in(lines)
    assert script.count(script.results(), GLOO, "passed CPU") == 1
    lines[1] = lines[1].replace("gloo", "loog")
    with pytest.raises(ValueError, match=r"no table .*loog"):
        script.take_in(lines)
    assert script.count(script.results(), GLOO, "passed CPU") == 1


def test_the_results_are_those_of_exactly_the_fault_tests_that_are_there(every_test: list[dict[str, Any]]) -> None:
    there = {test["id"]: test["gpu"] for test in every_test if test["fault"]}
    listed = set(json.loads(script.FAULTS.read_text(encoding="utf-8")))
    assert listed <= set(there), "results of tests that are gone: delete their lines of docs/trust.json"
    assert {test for test, gpu in there.items() if not gpu} <= listed, "run them with --support-report"


def test_a_failed_test_is_not_taken_in_and_a_later_result_replaces_the_earlier() -> None:
    about = {"device": "CPU", "versions": {"torch": "2.13.0+cpu"}, "date": "2026-11-22"}
    fault = {"fault": "kill -9", "where": "forward", "rank": 1, "happens": "ends", "transport": "gloo"}
    lines = [about] + [
        {"id": "one", "outcome": outcome, "fault": {**fault, "seconds": seconds}}
        for outcome, seconds in (("passed", 1.0), ("failed", 9.0), ("passed", 2.5))
    ]
    found = script.read_faults(map(json.dumps, lines))
    assert [result["seconds"] for result in found.values()] == [2.5]
    assert "| kill -9 | forward | ends | 2.5 s | gloo |" in script.fault_table([*found.values()])
