"""The account of the longest sequence's memory has the bytes that were counted here, and those measured on GPUs."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfa_megatron import TrainingConfig
from dfa_megatron.huggingface import distribute_attention
from tests.deepspeed import harness
from tests.support.workers import run_ranks

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
    from benchmarks.deepspeed_memory import Step, kept, recomputed
    from benchmarks.deepspeed_shapes import Shape

    shape = Shape(**WIDTHS, family="Qwen3")
    (counted,) = run_ranks(1, peaks, timeout=150)
    of_layer = max(recomputed(shape).values()) + (LAYERS - 1) * kept(shape)
    assert counted == pytest.approx(of_layer, rel=0.01)
    step = Step(shape=shape, layers=LAYERS, vocabulary=WORDS, tile=64, stages=10**6)
    assert (step.peak(2**21) - step.peak(2**20)) * 2**10 == pytest.approx(of_layer)


MEASURED = list(Path(__file__).parents[2].glob("benchmarks/results/*longest*.json"))


def test_the_account_is_near_every_measured_peak() -> None:
    from benchmarks.deepspeed_memory import Step
    from benchmarks.deepspeed_shapes import SHAPES

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
