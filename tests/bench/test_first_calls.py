"""First calls of packs: the benchmark runs whole on a CPU, and tells stalls from other calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import first_calls


def test_first_calls_over_the_limit_count_as_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.002, 1.0, 1.5, 2.0, 2.0025])
    monkeypatch.setattr(first_calls.time, "perf_counter", lambda: next(clock))
    out = tmp_path / "out.json"
    flags = "--device cpu --kernel cpu --tokens-per-rank 32 --heads 2 --kv-heads 1 --head-dim 8 --ranks 2 --packs 3"
    monkeypatch.setattr(sys, "argv", ["first_calls", *flags.split(), "--out", str(out)])
    first_calls.main()
    (row,) = json.loads(out.read_text())["rows"]
    assert row == {"ranks": 2, "median ms": 2.5, "stalled": 1, "stalled ms": 500.0, "first calls ms": [2.0, 500.0, 2.5]}
