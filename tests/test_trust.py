"""docs/trust.md says no more than its results, and lists every test that injects a fault."""

from __future__ import annotations

import json
from typing import Any

from docs import support as script


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
