"""docs/trust.md says no more than its results, and lists every test that injects a fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from docs import fault_tables as script

ROOT = Path(__file__).parents[1]
PLACES = ("tests/faults", "tests/runtime/agreement/test_calls_gpu.py")


def test_the_results_are_those_of_exactly_the_fault_tests_that_are_there(tmp_path: Path) -> None:
    report = tmp_path / "collected.jsonl"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["--support-report", str(report), *PLACES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()[1:]]
    there = {line["id"]: line["gpu"] for line in lines if line["fault"]}
    listed = set(json.loads(script.RESULTS.read_text(encoding="utf-8")))
    assert listed <= set(there), "results of tests that are gone: delete their lines of docs/trust.json"
    assert {test for test, gpu in there.items() if not gpu} <= listed, "run them with --support-report"


def test_a_failed_test_is_not_taken_in_and_a_later_result_replaces_the_earlier() -> None:
    about = {"device": "CPU", "versions": {"torch": "2.13.0+cpu"}, "date": "2026-11-22"}
    fault = {"fault": "kill -9", "where": "forward", "rank": 1, "happens": "ends", "transport": "gloo"}
    lines = [about] + [
        {"id": "one", "outcome": outcome, "fault": {**fault, "seconds": seconds}}
        for outcome, seconds in (("passed", 1.0), ("failed", 9.0), ("passed", 2.5))
    ]
    found = script.read(map(json.dumps, lines))
    assert [result["seconds"] for result in found.values()] == [2.5]
    assert "| kill -9 | forward | 1 | ends | 2.5 s | gloo |" in script.table(found, whole=True)


def test_the_tests_of_signals_that_the_page_names_are_there() -> None:
    named = re.findall(r"^- `(test_\w+)`$", (ROOT / "docs" / "trust.md").read_text(encoding="utf-8"), re.MULTILINE)
    source = (ROOT / "tests" / "examples" / "test_signals.py").read_text(encoding="utf-8")
    assert set(named) == set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
