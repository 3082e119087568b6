"""The benchmarks of whole models run at toy size on CPU ranks: all ways agree, and failures are told in their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.scripts import said_over_ranks
from tests.support.workers import by_turns, run_ranks


def test_every_way_agrees_with_ours_and_its_longest_sequence_runs(tmp_path: Path) -> None:
    words, out = ("--device", "cpu", "--lengths", "64", "128"), tmp_path / "toy.json"
    said_over_ranks(2, tmp_path, "benchmarks.whole_model", *words, "--offload", "--longest", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    ran = [(row["way"], row["length"]) for row in rows if "failed" not in row]
    assert ran == [(way, length) for length in (64, 128, 256) for way in ("ours", "ulysses", "alst")]
    assert {row["way"] for row in rows if "refused: context_parallel" in row.get("failed", "")} == {"pytorch"}
    for row in rows:
        assert all(far < 1e-5 for far in row.get("differs", {}).values())
        losses = [step["loss"] for step in row.get("steps", ())]
        assert losses == sorted(set(losses), reverse=True)  # it learns


def _forget_memory_once(rank: int, ranks: int, out: str) -> None:
    from benchmarks import whole_model
    from benchmarks.bench import Report
    from dfa_megatron.doctor.world import join

    class Small(whole_model.WholeBench):
        def step(self, way: str, length: int) -> dict[str, float]:
            if (way, length) == ("ulysses", 64):
                raise torch.OutOfMemoryError("CUDA out of memory")
            found = super().step(way, length)
            return found | {"loss": found["loss"] * (1.01 if (way, length) == ("alst", 64) else 1)}

    job = whole_model.Whole(device="cpu")
    bench = Small(job, join("cpu"), Report(Path(out), job, rows=[]), whole_model.time.perf_counter())
    for way, length in (("ours", 64), ("ulysses", 64), ("alst", 64), ("ours", 128), ("ulysses", 128)):
        bench.row(way, length, 1)


def test_a_way_without_memory_or_with_another_loss_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    run_ranks(2, _forget_memory_once, str(tmp_path / "rows.json"), timeout=120)
    failed = [row.get("failed") for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    memory, wrong = "out of memory: CUDA out of memory", "wrong: not what ours computes"
    assert failed == [None, memory, wrong, None, "a shorter sequence ran out of memory"]


@pytest.mark.parametrize("model", by_turns(["llama", "hybrid"]))
def test_two_ranks_and_one_without_ours_take_the_same_steps(model: str, tmp_path: Path) -> None:
    words, out = ("--model", model, "--device", "cpu", "--tokens", "600", "--steps", "2"), tmp_path / "toy.json"
    said_over_ranks(3, tmp_path, "benchmarks.long_run", *words, "--out", str(out))
    content = json.loads(out.read_text())
    assert len(content["rows"]) == 2
    assert all(content["apart"][0][what]["largest"] < 1e-5 for what in ("loss", "gradient_norm"))
    assert "<svg" in out.with_suffix(".svg").read_text()
