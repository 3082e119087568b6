"""The benchmarks of training and of the longest sequence run at toy size on CPU, and time nothing that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.deepspeed import harness
from tests.support.scripts import said_over_ranks
from tests.support.workers import run_ranks


def test_every_method_is_compared_and_then_timed(tmp_path: Path) -> None:
    methods, out = ("dfa-remat", "ulysses-full"), tmp_path / "toy.json"
    words = ("--shapes", "qwen3-4b", "33-heads", "--offload-optimizer", "--methods", *methods, "--tiled", "all")
    said = said_over_ranks(2, tmp_path, "benchmarks.deepspeed_training", *words, "--dry-run", "--out", str(out))
    report: dict[str, Any] = json.loads(out.read_text())
    shown = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert shown[-len(report["results"]) :] == report["results"]
    losses: dict[tuple[str, int], list[float]] = {}
    for result in report["results"]:
        if (result["shape"], result["method"]) == ("33-heads", "ulysses-full"):
            assert "not divisible" in result["failed"] or "a shorter sequence" in result["failed"]
            continue
        assert result["tokens_per_second"] == pytest.approx(2 * result["tokens_per_second_per_gpu"])
        losses.setdefault((result["shape"], result["length"]), []).append(result["loss"])
    assert {key: len(found) for key, found in losses.items()} == {
        ("qwen3-4b", 64): 2, ("qwen3-4b", 128): 2, ("33-heads", 64): 1, ("33-heads", 128): 1,
    }  # fmt: skip
    assert all(max(found) - min(found) < 1e-3 for found in losses.values())
    assert all(0 < report["agreement"]["qwen3-4b"][method]["gradients"] < 0.05 for method in methods)
    assert report["optimizer"].startswith("torch.optim.AdamW on the CPU")


def test_ranks_that_run_out_of_memory_end_an_attempt_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import deepspeed_longest

    out, launch = tmp_path / "toy.json", deepspeed_longest.launch
    words = ["--methods", "ulysses-full", "--pretend-limit", "70", "--gpus", "2", "--shortest", "80", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["deepspeed_longest.py", *words, "--out", str(out)])

    def started(command: list[str], **_: Any) -> Any:
        """Run the ranks of torchrun as workers: new ones would import all packages."""
        assert command[2:6] == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with contextlib.suppress(AssertionError):  # they end where they stand
            said_over_ranks(2, tmp_path, *command[7:])
        return SimpleNamespace(wait=lambda seconds: 1, poll=lambda: 1)

    monkeypatch.setattr(deepspeed_longest, "subprocess", SimpleNamespace(Popen=started, TimeoutExpired=TimeoutError))

    def attempts(args: Any, ranks: int, method: str, *more: Any) -> dict[str, Any]:
        compared = {"agreement": {"ulysses-full": {}}}  # `wrong` below compares for real
        return compared if method == "compare" else launch(args, ranks, method, *more)

    monkeypatch.setattr(deepspeed_longest, "launch", attempts)
    assert deepspeed_longest.main() == 0
    report = json.loads(out.read_text())
    (result,) = report["results"]
    assert result["failed"] == "out of memory: in a dry run"  # which only one of the ranks said
    assert report["longest"] == {}
    assert report["note"] == "2 layers, and tiny"


def master_weights(engine: Any) -> list[torch.Tensor]:
    """In float32, as the optimizer has them."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]


def longest_methods(ranks: int) -> None:
    """Both attentions of the search for the longest sequence are what one rank computes."""
    from benchmarks import deepspeed_common, deepspeed_longest

    os.environ["WORLD_SIZE"] = str(ranks)
    deepspeed_common.join = lambda seconds: None  # type: ignore[assignment]
    found = deepspeed_longest.agreement(
        deepspeed_longest.parse(["--dry-run", "--methods", "dfa-remat", "ulysses-full"])
    )
    assert all(0 < one["gradients"] < 0.05 for one in found["agreement"].values())


def wrong(rank: int, world_size: int) -> None:
    harness.prepare_worker(rank)
    from benchmarks import deepspeed_common as common
    from benchmarks import deepspeed_methods as methods
    from benchmarks.deepspeed_shapes import SHAPES

    shape, ours = SHAPES["qwen3-4b"].toy(), {"ours": methods.Method("dfa", "remat")}
    engine, _ = common.build(shape, layers=2, vocabulary=64, longest=64, tiled="all", offload=False, dry=True)
    assert engine.module.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert engine.module.model.config.head_dim * shape.heads != shape.hidden
    weights = master_weights(engine)
    assert methods.compare(engine, ours, 64, 64)["ours"]["gradients"] < 0.05
    assert all(torch.equal(a, b) for a, b in zip(weights, master_weights(engine), strict=True))
    common.take_step(engine, common.batch_of(engine, 64, 64, "dfa"))  # which does change them
    assert not any(torch.equal(a, b) for a, b in zip(weights, master_weights(engine), strict=True))
    right = methods._gradients

    def with_other_tokens(engine: Any, method: Any, batch: dict[str, Any], **choices: str) -> Any:
        if method.attention == "dfa":
            batch["input_ids"] = batch["input_ids"].flip(1)
        return right(engine, method, batch, **choices)

    longest_methods(world_size)
    methods._gradients = with_other_tokens
    with pytest.raises(RuntimeError, match="ours is not what one rank computes"):
        methods.compare(engine, ours, 64, 64)
    engine.destroy()


def test_what_is_not_what_one_rank_computes_is_refused() -> None:
    run_ranks(2, wrong, timeout=120)
