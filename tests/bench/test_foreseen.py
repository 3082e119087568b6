"""The simulation says what GPUs measured, and `auto` takes what was fastest; from the results that are kept."""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.plan.cost.choose import cheapest_degree
from dfa_megatron.plan.language.mask import causal


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("foreseen")


def test_where_launches_do_not_decide_simulation_and_choice_are_right(foreseen: Any) -> None:
    judged = [
        foreseen.judge(cell, measured)
        for path in sorted(foreseen.RESULTS.glob("*.json"))
        for cell, measured in foreseen.read(path).items()
    ]
    computed = [one for one in judged if not one.launches]
    errors = [abs(error) for one in computed if one.long for error in one.errors.values()]
    assert len(errors) >= 200
    assert sum(error <= 0.15 for error in errors) >= 0.95 * len(errors)
    choices = [one.lost for one in computed if len(one.measured) > 1]
    assert len(choices) >= 41
    assert sum(lost <= 0.03 for lost in choices) >= 0.9 * len(choices)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("2026-11-21-4xh200-ulysses-flash4", False), ("2026-11-22-4xh200-p2p-off-degrees-flash4", True)],
)
def test_where_degrees_of_ulysses_were_measured_the_one_left_open_is_the_fastest(
    foreseen: Any, name: str, kept: bool
) -> None:
    path, measured = foreseen.RESULTS / f"{name}.json", defaultdict[Any, dict[int, float]](dict)
    for row in json.loads(path.read_text())["rows"]:
        words = row["method"].split()
        if words[0] == "dfa" and "zigzag" not in words:
            degree = next((int(word[7:]) for word in words if word.startswith("ulysses")), 1)
            measured[foreseen._cell(path, 4, row, words, {})][degree] = row["both_ms"]
    assert [len(times) for times in measured.values()] == [3] * 4
    for cell, times in measured.items():
        taken = cheapest_degree(
            causal(cell.length), 4, schedule="auto", layout="contiguous", shape=cell.shape, hardware=cell.hardware,
            kept=kept,
        )  # fmt: skip
        assert times[taken] == min(times.values()), cell


def test_a_wrong_profile_is_found_out(foreseen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = foreseen.RESULTS / "2026-11-21-4xh200-schedules-flash4.json"
    monkeypatch.setattr(foreseen, "computing_with", lambda kernel, hardware: hardware)  # cuDNN's rates
    errors = [
        e for cell, measured in foreseen.read(path).items() for e in foreseen.judge(cell, measured).errors.values()
    ]
    assert len(errors) == 8
    assert max(errors) > 0.15
