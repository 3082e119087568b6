"""The triton kernel: our own attention forward and backward, for any band on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved, Takes
from dfa_megatron.kernels.adapters.shared import capability_text
from dfa_megatron.kernels.triton.support import (
    interpreted,
    large_shared_memory,
    on_device_of,
    triton_refusal,
    with_unit_stride,
)
from dfa_megatron.plan.language.leaves import LeafSizes

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Blocks = tuple[int, int, int, int]
"""(query rows, key rows, warps, pipeline stages) of a program."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The blocks of a program of each of the three kernels."""

    forward: Blocks
    dk_dv: Blocks
    dq: Blocks


LARGE: Mapping[int, Mapping[int, BlockSizes]] = MappingProxyType(
    {
        2: {
            64: BlockSizes((128, 128, 8, 3), (64, 128, 8, 3), (128, 64, 8, 3)),
            128: BlockSizes((128, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2)),
            256: BlockSizes((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
        },
        4: {
            64: BlockSizes((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
            128: BlockSizes((64, 32, 4, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
            256: BlockSizes((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        },
    }
)
"""BlockSizes by bytes of an element and by head_dim at most, for over 200 KiB of shared memory (Hopper, Blackwell)."""

SMALL: Mapping[int, Mapping[int, BlockSizes]] = MappingProxyType(
    {
        2: {
            64: BlockSizes((128, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
            128: BlockSizes((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
            256: BlockSizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
        },
        4: {
            64: BlockSizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
            128: BlockSizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
            256: BlockSizes((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        },
    }
)
"""The same for 99 KiB, the least that a GPU has from Ampere on."""

INTERPRETED = BlockSizes((32, 16, 1, 1), (16, 32, 1, 1), (32, 16, 1, 1))
"""Small, so that small tests go through every loop."""


class TritonKernel(BlockKernel):
    """bfloat16, float16 and float32, any band, head_dim to 256, grouped heads without copies.

    Deterministic always: dk and dv are summed over a group's heads inside one program, and dq has a kernel of its own.
    So there are no atomics, at the price of computing the scores twice (7 matrix products instead of 5).
    Runs on CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """

    name = "triton"
    backward_needs = "delta"
    takes = Takes("segments")
    caps_scores = True

    def refusal(self, need: Need) -> str | None:
        device = torch.device(need.device).type
        if device != "cuda" and not (device == "cpu" and interpreted()):
            return f"it runs on CUDA, not on {need.device}"
        if need.dtype not in _DTYPES:
            return f"it computes bfloat16, float16 and float32, not {need.dtype}"
        if max(need.head_dim, need.head_dim_v) > 256:
            return f"head_dim {need.head_dim} or head_dim_v {need.head_dim_v} is over 256"
        if device == "cuda" and (need.capability is None or need.capability < (8, 0)):
            return f"it needs compute capability 8.0 (Ampere) or newer, not {capability_text(need)}"
        return triton_refusal()

    def replays(self, *, deterministic: bool) -> bool:
        return True

    def leaves(self, need: Need) -> LeafSizes:
        return LeafSizes(least=16, usual=32) if interpreted() else LeafSizes(least=2048, usual=8192)

    def launch(self, call: BlockCall) -> Partial:
        from dfa_megatron.kernels.triton import launches

        with on_device_of(call.q):
            return launches.launch_forward(_readable(call), _sizes(call).forward)

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        from dfa_megatron.kernels.triton import launches

        assert saved.minus_delta is not None, "the triton kernel reads delta"
        call, dout, sizes = _readable(call), with_unit_stride(dout), _sizes(call)
        saved = Saved(saved.lse.contiguous(), saved.minus_delta.contiguous())
        with on_device_of(call.q):
            dk, dv = launches.launch_dk_dv(call, dout, saved, sizes.dk_dv)
            return launches.launch_dq(call, dout, saved, sizes.dq), dk, dv


def _readable(call: BlockCall) -> BlockCall:
    """Return the call with q, k and v whose last dimensions are contiguous."""
    q, k, v = call.q, call.k, call.v
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return call
    return replace(call, q=with_unit_stride(q), k=with_unit_stride(k), v=with_unit_stride(v))


def _sizes(call: BlockCall) -> BlockSizes:
    if interpreted():
        return INTERPRETED
    by_dim = (LARGE if large_shared_memory(call.q.device) else SMALL)[call.q.element_size()]
    return by_dim[next(limit for limit in by_dim if max(call.q.shape[-1], call.v.shape[-1]) <= limit)]
