"""What a call's tensors must be, and what the planner and the wire need to know of them."""

from __future__ import annotations

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.runtime.request import Request

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        UnsupportedError: says which shapes, dtypes or devices, and what would fit.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(shapes, "each must have 4 dimensions", "(batch, local_seq, heads, head_dim)")
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3]):
        raise UnsupportedError(
            shapes,
            "they do not fit together",
            "one batch and local_seq for all, one kv_heads for k and v, one head_dim for q and k",
        )
    if 0 in q.shape or 0 in v.shape:
        raise UnsupportedError(shapes, "nothing may be empty", "at least one token, head and channel per rank")
    if q.shape[2] % k.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} heads with {k.shape[2]} kv_heads",
            "heads must be a multiple of kv_heads",
            "for example equal counts",
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise UnsupportedError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype}",
            "all three must be one floating-point dtype",
            ", ".join(map(str, DTYPES)),
        )
    if q.device.type not in ("cpu", "cuda"):
        what, why = f"attention of tensors on {q.device}", "no kernel computes and no transport sends there"
        raise UnsupportedError(what, why, "tensors on a GPU, or on a CPU")
    if not q.device == k.device == v.device:
        raise UnsupportedError(
            f"devices {q.device}, {k.device}, {v.device}", "all three must be on one device", str(q.device)
        )


def wire_dtype(request: Request, q: torch.Tensor) -> torch.dtype:
    """Of partial results while they travel."""
    return q.dtype if request.wire_dtype == "input" else accumulator_dtype(q.dtype)


def shape_of(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionShape:
    """What the planner needs to know of the tensors."""
    return AttentionShape(
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        bytes_per_element=q.dtype.itemsize,
        accumulator_bytes=accumulator_dtype(q.dtype).itemsize,
        wire_bytes=wire_dtype(request, q).itemsize,
    )
