"""The benchmark of Megatron's layers runs at toy size on CPU, and writes what it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dfa_megatron.testing.workers import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def bench(rank: int, world_size: int, arguments: list[str]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    import megatron_layers

    assert megatron_layers.main(arguments) == 0


def test_every_mode_and_training_give_figures(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "toy.json"
    modes = ["remat", "remat-offload", "full", "none"]
    run_ranks(2, bench, ["--toy", "--out", str(out), "--modes", *modes], timeout=120)
    report = json.loads(out.read_text())
    assert [result["mode"] for result in report["layers"]] == modes
    assert all(result["ms_per_layer"] > 0 and result["length"] == 48 for result in report["layers"])
    assert [result["mode"] for result in report["training"]] == ["remat", "full"]
    for result in report["training"]:
        assert result["tokens_per_second_per_gpu"] > 0
        assert 0 < result["last_loss"] < 10
    first, second = report["training"]
    assert first["first_loss"] == second["first_loss"]
    assert report["machine"]["ranks"] == 2
    assert report["seconds"] > 0
