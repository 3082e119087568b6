"""docs/support.md says no more than its results: every cell has tests, and the page is what they came to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dfa_megatron import names

ROOT = Path(__file__).parents[1]
TESTS = {
    "float64": "tests/kernels/test_kernel_conformance.py::test_a_block_is_what_dense_float64_attention_says"
    "[float64-64x64-full-h3:3-d32-b2-{} on cuda]",
    "gloo": "tests/runtime/comm/test_gloo.py::test_every_schedule_and_dtype_is_exact_over_gloo[2]",
    "balanced": "tests/runtime/execute/test_together.py::test_every_schedule_is_exact[balanced-contiguous-full]",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_support", ROOT / "docs" / "update_support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_results_say(script: ModuleType) -> None:
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert script.page(text, json.loads(script.RESULTS.read_text(encoding="utf-8"))) == text, (
        "run `python docs/update_support.py`"
    )


def test_every_cell_stands_for_tests_that_are_there(script: ModuleType, tmp_path: Path) -> None:
    patterns = script.rows.patterns()
    folders = sorted(folder.name for folder in (ROOT / "tests").iterdir() if any(folder.name in p for p in patterns))
    report = tmp_path / "collected.jsonl"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["--support-report", str(report), *(f"tests/{folder}" for folder in folders)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    ids = [json.loads(line)["id"] for line in report.read_text(encoding="utf-8").splitlines()[1:]]
    installed = {test.split("/")[1] for test in ids}  # tests/megatron is not collected without megatron-core
    assert {"kernels", "runtime", "remat"} <= installed
    for pattern in patterns:
        if pattern.split("/")[0] in set(folders) - installed:
            continue
        assert script.selected(pattern, ids), f"no test is left for {pattern} of docs/support_rows.py"


def test_every_kernel_has_a_column(script: ModuleType) -> None:
    assert set(script.rows.KERNELS) == set(names.KERNELS) - {"auto"}


def reported(script: ModuleType, *results: tuple[str, str, bool, str], device: str = "CPU") -> dict[str, Any]:
    head = {"date": "2026-01-02", "device": device, "python": "3.12.0", "versions": {"torch": "2.9"}, "command": "a"}
    tests = [{"id": test, "outcome": outcome, "gpu": gpu, "reason": reason} for test, outcome, gpu, reason in results]
    return script.read([json.dumps(line) for line in (head, *tests)])


def cells(script: ModuleType, runs: list[dict[str, Any]], grid: str, label: str) -> list[str]:
    return [script.cell(runs, pattern) for pattern in script.rows.GRIDS[grid][1][label]]


def test_a_skip_is_a_refusal_where_the_kernel_says_so_and_no_result_where_the_machine_lacks_something(
    script: ModuleType,
) -> None:
    at = {name: index for index, name in enumerate(script.rows.KERNELS)}
    run = reported(
        script,
        (TESTS["float64"].format("flash4"), "skipped", True, "Skipped: flash4: it computes bfloat16 and float16"),
        (TESTS["float64"].format("aten"), "skipped", True, "Skipped: aten: PyTorch is built without CUDA"),
        (TESTS["float64"].format("triton"), "skipped", True, "Skipped: no CUDA device"),
    )
    float64 = cells(script, [run], "kernels", "float64")
    assert [float64[at[name]] for name in ("flash4", "aten", "triton")] == ["refused", "GPU: not run", "GPU: not run"]
    gpu = reported(script, (TESTS["float64"].format("aten"), "passed", True, ""), device="1 x H200")
    assert cells(script, [run, gpu], "kernels", "float64")[at["aten"]] == "GPU"


def test_a_failure_is_not_hidden_by_tests_that_passed(script: ModuleType) -> None:
    other = TESTS["gloo"].replace("[2]", "[3]")
    run = reported(script, (TESTS["gloo"], "passed", False, ""), (other, "failed", False, ""))
    pattern = next(p for label, p in script.rows.RUNTIME.items() if "(gloo)" in label)
    assert script.seen([run], pattern, "CPU", "torch") == "**failed**"
    again = reported(script, (TESTS["gloo"], "passed", False, ""), (other, "passed", False, ""))
    merged = script.merge([run], again)
    assert len(merged) == 1
    assert script.seen(merged, pattern, "CPU", "torch") == "2.9"


def test_a_test_that_passes_because_of_a_refusal_is_shown_as_one(script: ModuleType) -> None:
    run = reported(script, (TESTS["balanced"], "passed", False, ""))
    assert cells(script, [run], "schedules", "`balanced`, contiguous tokens")[1] == "refused"


def test_results_of_a_part_of_the_tests_leave_the_other_cells(script: ModuleType) -> None:
    first = reported(script, (TESTS["gloo"], "passed", False, ""))
    second = reported(script, (TESTS["balanced"], "passed", False, ""))
    pattern = next(p for label, p in script.rows.RUNTIME.items() if "(gloo)" in label)
    assert script.seen(script.merge([first], second), pattern, "CPU", "torch") == "2.9"
