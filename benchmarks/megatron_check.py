"""Compare the attention of a block of Megatron's layers with float64 before the block is timed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.megatron_common import Mode, Shape
from dfa_megatron import shard_sequence
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.doctor.world import slowest
from dfa_megatron.plan.language.geometry import CAUSAL

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Of the norm of the difference to the norm of what is right."""


def attention_errors(block: Any, shape: Shape, mode: Mode, tokens: int) -> dict[str, float]:
    """Return the relative errors of out, dq, dk and dv of the block's last attention: each is the largest of all ranks.

    tokens: of a short sequence. A layer that has no core attention, such as a gated delta net, is passed over.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    found = [getattr(layer.self_attention, "core_attention", None) for layer in block.layers]
    core = [attention for attention in found if attention is not None][-1]
    device, dtype = next(block.parameters()).device, block.config.params_dtype
    generator = torch.Generator(device).manual_seed(3)
    heads = (shape.heads, shape.groups, shape.groups, shape.heads)
    whole = [torch.randn(tokens, 1, n, shape.head_dim, device=device, generator=generator) for n in heads]
    q, k, v, dout = (x.to(dtype) for x in whole)
    wanted = dense(q, k, v, dout)

    def own(x: torch.Tensor) -> torch.Tensor:
        if mode.tensor:
            return x.chunk(dist.get_world_size(), 2)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
        group = parallel_state.get_context_parallel_group()
        layout = "zigzag" if mode.checkpoint is None else "contiguous"
        return shard_sequence(x, group=group, layout=layout, dim=0).contiguous()

    leaves = [own(x).clone().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = core(*leaves, None, attn_mask_type=AttnMaskType.causal)
    gradients = torch.autograd.grad(out, leaves, own(dout).flatten(2))
    got = [out.detach().unflatten(2, (-1, shape.head_dim)), *gradients]
    errors = [float((x.double() - own(y)).norm() / own(y).norm()) for x, y in zip(got, wanted, strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), slowest(errors), strict=True))


def dense(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return out, dq, dk and dv in float64, given q, k, v and dout (tokens, 1, heads, head_dim)."""
    *leaves, dout = (x.transpose(0, 1).double() for x in tensors)
    for x in leaves:
        x.requires_grad_()
    out, _ = dense_attention(*leaves, CAUSAL)
    return [x.transpose(0, 1) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]
