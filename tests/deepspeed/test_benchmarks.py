"""The benchmarks run at toy size on CPU ranks, time nothing that is wrong, and count the bytes that are there.

Of training, of the longest sequence and of whole models: failures are told in their rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfa_megatron import TrainingConfig
from dfa_megatron.huggingface import distribute_attention
from tests.deepspeed import harness
from tests.support.pages import ROOT
from tests.support.scripts import said_over_ranks
from tests.support.workers import by_turns, over_ranks, run_ranks


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
    from benchmarks import deepspeed_longest

    os.environ["WORLD_SIZE"] = str(ranks)
    found = deepspeed_longest.agreement(
        deepspeed_longest.parse(["--dry-run", "--methods", "dfa-remat", "ulysses-full"])
    )
    assert all(0 < one["gradients"] < 0.05 for one in found["agreement"].values())


@over_ranks(2, timeout=120)
def test_what_is_not_what_one_rank_computes_is_refused(rank: int, ranks: int) -> None:
    harness.prepare_worker(rank)
    from benchmarks import deepspeed_common as common
    from benchmarks.model_shapes import METHODS, SHAPES

    shape, ours = replace(SHAPES["qwen3-4b"].toy(), layers=2, vocabulary=64), {"ours": METHODS["dfa-remat"]}
    engine, _ = common.build(shape, 64, tiled="all", offload=False, dry=True)
    assert engine.module.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert engine.module.model.config.head_dim * shape.heads != shape.hidden
    weights = master_weights(engine)
    assert common.compare(engine, ours, 64)["ours"]["gradients"] < 0.05
    assert all(torch.equal(a, b) for a, b in zip(weights, master_weights(engine), strict=True))
    common.take_step(engine, common.batch_of(engine, 64, "dfa"))  # which does change them
    assert not any(torch.equal(a, b) for a, b in zip(weights, master_weights(engine), strict=True))
    right = common._gradients

    def with_other_tokens(engine: Any, method: Any, batch: dict[str, Any], **choices: str) -> Any:
        if method.attention == "dfa":
            batch["input_ids"] = batch["input_ids"].flip(1)
        return right(engine, method, batch, **choices)

    longest_methods(ranks)
    common._gradients = with_other_tokens
    with pytest.raises(RuntimeError, match="ours is not what one rank computes"):
        common.compare(engine, ours, 64)
    engine.destroy()


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


def test_an_mlp_by_tiles_is_the_same_mlp() -> None:
    from benchmarks.whole_model import by_tiles

    mlp = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.SiLU(), torch.nn.Linear(9, 5)).double()
    x = torch.randn(1, 23, 5, dtype=torch.float64, requires_grad=True)
    found = ([y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])] for y in (mlp(x), by_tiles(mlp, 7, x)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


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
    bench = Small(job, join("cpu"), Report(Path(out), job, rows=[]))
    for way, length in (("ours", 64), ("ulysses", 64), ("alst", 64), ("ours", 128), ("ulysses", 128)):
        bench.row(way, length, 1)


def test_a_way_without_memory_or_with_another_loss_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    run_ranks(2, _forget_memory_once, str(tmp_path / "rows.json"), timeout=120)
    failed = [row.get("failed") for row in json.loads((tmp_path / "rows.json").read_text())["rows"]]
    memory, wrong = "out of memory: CUDA out of memory", "wrong: not what ours computes"
    assert failed == [None, memory, wrong, None, "a shorter sequence ran out of memory"]


@pytest.mark.parametrize("model", by_turns(["llama", "hybrid"]))
def test_two_ranks_with_ours_and_one_without_take_the_same_steps(model: str, tmp_path: Path) -> None:
    words, out = ("--model", model, "--device", "cpu", "--tokens", "600", "--steps", "2"), tmp_path / "toy.json"
    said_over_ranks(2, tmp_path, "benchmarks.long_run", *words, "--out", str(out))
    content = json.loads(out.read_text())
    assert len(content["rows"]) == 2
    assert all(content["apart"][0][what]["largest"] < 1e-5 for what in ("loss", "gradient_norm"))
    assert "<svg" in out.with_suffix(".svg").read_text()


WIDTHS = {"hidden": 160, "intermediate": 16, "heads": 8, "kv_heads": 2, "head_dim": 32}
LAYERS, WORDS, TILES = 3, 32, 8


class Held(TorchDispatchMode):
    """Count the bytes of tensors that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                self.known[key] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.known.pop, key, 0)
        self.peak = max(self.peak, sum(self.known.values()))
        return made


def peaks(rank: int, ranks: int) -> float:
    """Bytes that a token more adds to the peak of a forward and backward, with ALST's tiles."""
    harness.prepare_worker(rank)
    import transformers

    from benchmarks import deepspeed_common as common

    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=WIDTHS["hidden"], intermediate_size=WIDTHS["intermediate"],
        num_hidden_layers=LAYERS, num_attention_heads=WIDTHS["heads"], num_key_value_heads=WIDTHS["kv_heads"],
        head_dim=WIDTHS["head_dim"], attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).train()
    training, found = common.Training(model, "all"), {}
    training.tiles = TILES
    distribute_attention(model, config=TrainingConfig(checkpoint="remat"))
    for rows in (512, 512, 1024):
        ids = torch.arange(rows)[None] % WORDS
        with Held() as held:
            loss = training(input_ids=ids, labels=ids, group=dist.group.WORLD)
            loss.backward()
        found[rows] = held.peak
        training.zero_grad()
    return (found[1024] - found[512]) / 512


def test_the_account_has_the_bytes_of_a_token_that_were_counted() -> None:
    from benchmarks.memory_account import Step, kept, recomputed
    from benchmarks.model_shapes import Shape

    shape = Shape(**WIDTHS, family="Qwen3")
    (counted,) = run_ranks(1, peaks, timeout=150)
    of_layer = max(recomputed(shape).values()) + (LAYERS - 1) * kept(shape)
    assert counted == pytest.approx(of_layer, rel=0.01)
    step = Step(shape=shape, layers=LAYERS, vocabulary=WORDS, tile=64, stages=10**6)
    assert (step.peak(2**21) - step.peak(2**20)) * 2**10 == pytest.approx(of_layer)


MEASURED = [*ROOT.glob("benchmarks/results/*longest*.json")]


def test_the_account_is_near_every_measured_peak() -> None:
    from benchmarks.memory_account import Step
    from benchmarks.model_shapes import SHAPES

    seen = 0
    for path in MEASURED:
        file = json.loads(path.read_text())
        ranks, arguments = file["gpus"], file["arguments"]
        for one in file["results"]:
            if one["method"] == "dfa-remat" and "peak_gib" in one:
                shape = SHAPES[file["shape"]]
                step = Step(
                    shape=shape, layers=int(arguments["layers"]), vocabulary=shape.vocabulary,
                    tile=2048, ranks=ranks, offload=arguments["offload_optimizer"] == "True",
                )  # fmt: skip
                assert step.peak(one["length"] // ranks) == pytest.approx(one["peak_gib"], rel=0.002), path.name
                seen += 1
    assert seen == 5
