"""The distributed attention under every way to checkpoint: gradients to the bit, and nothing runs or travels twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dfa_megatron import dist_flash_attn_func, remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.workers import over_ranks

LAYERS, LOCAL, HEADS, HEAD_DIM = 2, 6, 2, 4
HIDDEN = HEADS * HEAD_DIM
WAYS: dict[str, Callable[..., Any]] = {
    "none": lambda fn, x: fn(x),
    "full": partial(checkpoint, use_reentrant=False),
    "full reentrant": partial(checkpoint, use_reentrant=True),
    "context_fn": partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "remat_checkpoint": remat.remat_checkpoint,
    "offloaded": partial(remat.remat_checkpoint, offload=True),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=remat.selective_context_fn),
}


@pytest.mark.support("runtime", "rematerialization between ranks")
@pytest.mark.parametrize(("ranks", "schedule"), [(1, "auto"), (2, "ring"), (2, "balanced_shared"), (3, "balanced")])
@over_ranks()
def test_remat_runs_and_sends_half_of_full_recompute_with_the_same_bits(rank: int, ranks: int, schedule: str) -> None:
    """Gradients and counts of two micro-batches in flight, in each way of checkpointing."""
    torch.manual_seed(ranks)
    layers = [torch.nn.Linear(HIDDEN, 3 * HIDDEN, dtype=torch.float64) for _ in range(LAYERS)]

    def layer(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(1, LOCAL, HEADS, HEAD_DIM) for t in linear(x).chunk(3, -1))
        out = dist_flash_attn_func(q, k, v, causal=True, config=DistAttentionConfig(schedule=schedule))
        assert isinstance(out, torch.Tensor)
        return x + torch.dropout(out.reshape(1, LOCAL, HIDDEN).tanh(), 0.2, True)

    counts: dict[str, dict[str, int]] = {}
    want: list[Any] = []
    for name, way in WAYS.items():
        torch.manual_seed(100 + rank)
        leaves = [torch.randn(1, LOCAL, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        outs = list(leaves)
        for linear in layers:
            linear.zero_grad()
        COUNTERS.reset()
        for linear in layers:
            outs = [way(partial(layer, linear), x) for x in outs]
        for out in outs:
            out.square().sum().backward()
        got = [leaf.grad for leaf in leaves] + [p.grad.clone() for linear in layers for p in linear.parameters()]
        want, counts[name] = got if name == "none" else want, COUNTERS.snapshot()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
    plain, sent = counts["none"], torch.tensor(counts["none"]["forward_messages"])
    torch.distributed.all_reduce(sent)
    assert (sent > 0) == (ranks > 1)
    assert plain["attention_forwards"] == 2 * LAYERS
    for count in ("attention_forwards", "kernel_forwards", "forward_messages", "forward_bytes"):
        for full in ("full", "full reentrant"):
            assert counts[full][count] == 2 * plain[count]
        for kept in ("context_fn", "remat_checkpoint", "offloaded", "selective"):
            assert counts[kept][count] == plain[count]
    for count in ("attention_backwards", "kernel_backwards", "backward_messages", "backward_bytes"):
        assert all(counts[name][count] == plain[count] for name in WAYS)
    for front in ("context_fn", "remat_checkpoint", "offloaded"):
        assert counts[front]["reused"] == 2 * LAYERS
        assert counts[front]["remat_bytes"] == 2 * LAYERS * LOCAL * (HIDDEN + HEADS) * 8


def test_no_frame_is_seen_while_a_region_is_compiled() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if remat.active_frame() is None else x.cos()

    torch._dynamo.reset()
    compiled = torch.compile(region, backend="eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    out = checkpoint(compiled, x, use_reentrant=False, context_fn=remat.context_fn)
    assert torch.equal(out, x.sin())


def test_the_policy_saves_our_operator_alone() -> None:
    save, other = torch.ops.dfa_megatron.attention.default, torch.ops.aten.mm.default
    assert remat.selective_policy(None, save) == CheckpointPolicy.MUST_SAVE
    assert remat.selective_policy(None, other) == CheckpointPolicy.PREFER_RECOMPUTE
    assert frozenset({"dfa_megatron::attention"}) == remat.SAVED_OPERATORS
