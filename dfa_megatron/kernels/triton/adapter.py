"""The triton kernel: our own attention forward and backward, for any band on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from dfa_megatron.kernels.adapters.gpu import capability_text
from dfa_megatron.kernels.alibi import Alibi, Biasing
from dfa_megatron.kernels.api import Need, Saved
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.triton.support import (
    Diagonals,
    interpreted,
    large_shared_memory,
    on_device_of,
    triton_refusal,
    with_unit_stride,
)
from dfa_megatron.plan.language.geometry import FULL, Band

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Sizes:
    """(query rows, key rows, warps, pipeline stages) of a program of each of the three kernels."""

    forward: tuple[int, int, int, int]
    dk_dv: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]


LARGE: Mapping[int, Mapping[int, Sizes]] = MappingProxyType(
    {
        2: {
            64: Sizes((128, 128, 8, 3), (64, 128, 8, 3), (128, 64, 8, 3)),
            128: Sizes((128, 128, 8, 2), (64, 128, 8, 2), (128, 64, 8, 2)),
            256: Sizes((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
        },
        4: {
            64: Sizes((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
            128: Sizes((64, 32, 4, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
            256: Sizes((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        },
    }
)
"""Sizes by bytes of an element and by head_dim at most, for over 200 KiB of shared memory (Hopper, Blackwell)."""

SMALL: Mapping[int, Mapping[int, Sizes]] = MappingProxyType(
    {
        2: {
            64: Sizes((128, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
            128: Sizes((64, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
            256: Sizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
        },
        4: {
            64: Sizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
            128: Sizes((64, 32, 4, 1), (16, 32, 4, 1), (32, 16, 4, 1)),
            256: Sizes((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
        },
    }
)
"""The same for 99 KiB, the least that a GPU has from Ampere on."""

INTERPRETED = Sizes((32, 16, 1, 1), (16, 32, 1, 1), (32, 16, 1, 1))
"""Small, so that small tests go through every loop."""


class TritonKernel(Biasing):
    """bfloat16, float16 and float32, any band, head_dim to 256, grouped heads without copies.

    Deterministic always: dk and dv are summed over a group's heads inside one program, dq in a kernel of its own, so
    there are no atomics, at the price of computing the scores twice (7 matrix products instead of 5).
    Runs on CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests.
    """

    name = "triton"
    backward_needs: Literal["delta", "out"] = "delta"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
        device = torch.device(need.device).type
        if device != "cuda" and not (device == "cpu" and interpreted()):
            return f"it runs on CUDA, not on {need.device}"
        if need.dtype not in _DTYPES:
            return f"it computes bfloat16, float16 and float32, not {need.dtype}"
        if need.heads % need.kv_heads:
            return f"heads ({need.heads}) must be a multiple of kv_heads ({need.kv_heads})"
        if max(need.head_dim, need.head_dim_v) > 256:
            return f"head_dim {need.head_dim} or head_dim_v {need.head_dim_v} is over 256"
        if device == "cuda" and (need.capability is None or need.capability < (8, 0)):
            return f"it needs compute capability 8.0 (Ampere) or newer, not {capability_text(need)}"
        return triton_refusal()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Band, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockKernel.forward`."""
        from dfa_megatron.kernels.triton import forward as triton_forward

        q, k, v = (with_unit_stride(x) for x in (q if softmax_scale >= 0 else -q, k, v))
        with on_device_of(q):
            return triton_forward.launch(
                q,
                k,
                v,
                Diagonals.of(band, q.shape[1], k.shape[1]),
                abs(softmax_scale),
                _sizes(q, v).forward,
                self.softcap,
                self.alibi,
            )

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        *,
        band: Band,
        softmax_scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `BlockKernel.backward`; reads `saved.delta`."""
        diagonals = Diagonals.of(band, q.shape[1], k.shape[1])
        return _backward(dout, q, k, v, saved, diagonals, softmax_scale, None, self.softcap, self.alibi)

    def forward_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, segments: Segments, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenKernel.forward_segments`: one launch, whatever the bands."""
        from dfa_megatron.kernels.triton import forward as triton_forward

        q, k, v = (with_unit_stride(x) for x in (q if softmax_scale >= 0 else -q, k, v))
        with on_device_of(q):
            return triton_forward.launch_packed(
                q, k, v, segments, abs(softmax_scale), _sizes(q, v).forward, self.softcap, self.alibi
            )

    def backward_segments(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        *,
        segments: Segments,
        softmax_scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, ...]:
        """See `VarlenKernel.backward_segments`: as many launches as for one segment."""
        diagonals = Diagonals.of(FULL, 1, 1)
        return _backward(dout, q, k, v, saved, diagonals, softmax_scale, segments, self.softcap, self.alibi)


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    diagonals: Diagonals,
    softmax_scale: float,
    segments: Segments | None,
    softcap: float,
    alibi: Alibi | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dfa_megatron.kernels.triton import backward as triton_backward
    from dfa_megatron.kernels.triton.call import Call

    assert saved.delta is not None, "the triton kernel reads delta"
    dout, q_unit, k, v = (with_unit_stride(x) for x in (dout, q if softmax_scale >= 0 else -q, k, v))
    lse, delta = saved.lse.contiguous(), saved.delta.contiguous()
    call = Call(dout, q_unit, k, v, lse, delta, diagonals, abs(softmax_scale), segments, softcap, alibi)
    sizes = _sizes(q, v)
    with on_device_of(q):
        dk, dv = triton_backward.launch_dk_dv(call, sizes.dk_dv)
        dq = triton_backward.launch_dq(call, sizes.dq)
    return dq if softmax_scale >= 0 else -dq, dk, dv


def _sizes(q: torch.Tensor, v: torch.Tensor) -> Sizes:
    if interpreted():
        return INTERPRETED
    by_dim = (LARGE if large_shared_memory(q.device) else SMALL)[q.element_size()]
    return by_dim[next(limit for limit in by_dim if max(q.shape[-1], v.shape[-1]) <= limit)]
