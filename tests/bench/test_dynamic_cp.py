"""The simulation of context-parallel sizes packs every document once, and its costs are near measured ones."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import dynamic_cp
from benchmarks.dynamic_cp_packs import all_ranks, dynamic, fixed


def test_every_document_is_packed_once_within_the_budget_and_all_ranks_have_work() -> None:
    draw = random.Random()
    for ranks in (4, 6, 16):
        lengths = [draw.randint(1, 4 * 100) for _ in range(40)]
        packed = {4: dynamic(lengths, ranks, 100), 1: all_ranks(lengths, ranks, 100)}
        if ranks % 4 == 0:
            packed[2] = fixed(lengths, ranks, 100, 4)
        for batches in packed.values():
            assert Counter(lengths) == Counter(length for batch in batches for g in batch for length in g.lengths)
            assert all(sum(group.size for group in batch) == ranks for batch in batches)
            assert all(group.tokens <= 100 and group.lengths for batch in batches for group in batch)


def test_quick_runs_and_the_planner_is_near_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dynamic_cp", "--quick", "--out", str(tmp_path / "out.json")])
    dynamic_cp.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert all(0.87 < check["simulated ms"] / check["measured ms"] < 1.18 for check in found["checks"])
    for row in found["rows"]:
        assert all(rate > 0 for rate in row["rate"].values())
        assert row["rate"]["ours 4"] == row["rate"]["ours all"]  # one group of four ranks
