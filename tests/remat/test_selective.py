"""Selective checkpointing saves our operator alone; a compiled region sees no frame. tests/runtime compiles both."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import dfa_megatron.attention  # noqa: F401 -- it registers the operator
from dfa_megatron import remat


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
