"""Logits of whole models are the same bits at any number of ranks, where linear layers compute tiles of one shape.

Under autocast a model with float32 weights computes what it computes on one rank, within bfloat16's rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface.attention_function import PlannedMask, attention
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.one_process import assert_gradients, called
from tests.huggingface.sweep import tiny
from tests.support import pages
from tests.support.close import assert_close
from tests.support.models import LAYERS, VOCABULARY, build, gradients, text
from tests.support.workers import by_turns, over_ranks, run_ranks

KINDS = ("llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral")
"""Plain, with grouped heads, windows, sinks, experts."""
TOKENS = 301


def batch_of(form: str) -> dict[str, Any]:
    ids = torch.randint(1, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    if form == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(hi) for hi in (1, 150, 37, 113)])[None]}
    return {"input_ids": ids} | ({"prompt_tree": ((100, 120, 81), (-1, 0, 0))} if form == "tree" else {})


CASES = [
    *((kind, form, "float32") for kind in KINDS for form in ("whole", "packed")),
    ("llama", "tree", "float32"),
    ("qwen3", "packed", "bfloat16"),
]


def tiles() -> TorchFunctionMode:
    """Return the page's mode."""
    names: dict[str, Any] = {"ids": torch.ones(1, 1, dtype=torch.long), "model": lambda **_: _Nothing}
    mode: TorchFunctionMode = pages.run(("docs/same-bits.md", "RowsInTiles"), names)["RowsInTiles"]()
    return mode


class _Nothing:
    logits = None


def logits_of(rank: int, ranks: int) -> list[torch.Tensor]:
    """Return the logits of this rank's tokens, of every case."""
    found = list[torch.Tensor]()
    for kind, form, dtype in by_turns(CASES):
        model = tiny.build(kind).to(getattr(torch, dtype)).eval()
        dfa_hf.distribute_attention(model, config=TrainingConfig(numerics="invariant"))
        with torch.no_grad(), tiles():
            found.append(model(**batch_of(form)).logits)
    return found


@pytest.mark.support("models", "the same bits of logits at any number of ranks")
def test_logits_have_the_same_bits_at_any_number_of_ranks() -> None:
    (one,) = run_ranks(1, logits_of, timeout=150.0)
    for ranks in (2, 3, 4):
        many = [torch.cat(parts, 1) for parts in zip(*run_ranks(ranks, logits_of, timeout=150.0), strict=True)]
        differing = [case for case, a, b in zip(by_turns(CASES), one, many, strict=True) if not torch.equal(a, b)]
        assert differing == [], ranks


@pytest.mark.gpu(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma3Text"])
@over_ranks(2, cuda=True, timeout=580)
def test_two_gpus_have_the_logits_of_one(rank: int, ranks: int, kind: str) -> None:
    alone, found = [dist.new_group([each]) for each in range(ranks)][rank], list[torch.Tensor]()
    ids = torch.randint(1, VOCABULARY, (1, 7834), generator=torch.Generator().manual_seed(1)).cuda()
    places = torch.cat([torch.arange(hi) for hi in (1, 2500, 37, 4096, 1200)])[None].cuda()
    for group in (alone, dist.group.WORLD):
        model = build(kind, heads=8, kv_heads=2, head_dim=64)
        dfa_hf.distribute_attention(model.cuda().bfloat16(), group=group, config=TrainingConfig(numerics="invariant"))
        with torch.no_grad(), tiles():
            found.append(model(input_ids=ids, position_ids=places).logits)
    assert torch.equal(shard_sequence(found[0]), found[1])


PLANNED = PlannedMask()
TOLERANCE = 3e-2
"""Of bfloat16's rounding through two layers with large weights: eager and sdpa on one rank are 1.3e-2 apart."""


def step(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """A forward in bfloat16, and a backward outside of autocast, as PyTorch recommends it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch)
    out.loss.backward()
    return out


@pytest.mark.support("models", "autocast")
@over_ranks(2, timeout=120)
def test_logits_and_gradients_are_those_of_one_rank(rank: int, ranks: int) -> None:
    batch = text(2, 12 * ranks, seed=1, unlabelled=5)
    cases = (("Llama", "auto", "none"), ("Llama", "reference", "remat"), ("Qwen3", "cpu", "full"))
    for kind, kernel, checkpoint in cases:
        reference = build(kind)
        reference.set_attn_implementation("sdpa")
        want = step(reference, batch)
        model = dfa_hf.distribute_attention(build(kind), config=TrainingConfig(kernel=kernel, checkpoint=checkpoint))
        COUNTERS.reset()
        got = step(model, batch)
        assert COUNTERS.attention_forwards == LAYERS * (2 if checkpoint == "full" else 1)
        assert got.logits.dtype is want.logits.dtype is torch.bfloat16
        assert_close(got.logits, shard_sequence(want.logits), tolerance=TOLERANCE, name=f"{kind} logits")
        assert all(gradient.dtype is torch.float32 for gradient in gradients(model).values())
        assert_gradients(model, gradients(reference), kind, TOLERANCE)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_kernels_do_within_autocast_what_they_do_outside(kernel: str) -> None:
    """The reference kernel's own products are in float32, which autocast would round."""
    model = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(kernel=kernel))
    layer = model.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 12, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    low = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    with called(layer, 12):
        want, _ = attention(layer, *low, PLANNED)
    with called(layer, 12), torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = attention(layer, q, k, low[2], PLANNED)  # as rotary embeddings leave them
        double, _ = attention(layer, q.double(), k.double(), v.double(), PLANNED)
    assert torch.equal(got, want)
    assert double.dtype is torch.float64  # autocast leaves it alone
