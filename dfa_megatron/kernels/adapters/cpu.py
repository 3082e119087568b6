"""The CPU kernel: PyTorch's fused attention for CPU, which takes and gives the lse, with bands through small masks."""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch

from dfa_megatron.kernels.adapters.operators import Operator
from dfa_megatron.kernels.api import Need, Saved, accumulator_dtype, form_of
from dfa_megatron.kernels.bands import backward_by_pieces, cut_rows, forward_by_pieces, tile_of, visible
from dfa_megatron.plan.language.geometry import Band, Tile

_INPUTS = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
_FORWARD = Operator("aten::_scaled_dot_product_flash_attention_for_cpu", _INPUTS, results=2)
_BACKWARD = Operator(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", ("grad_out", "out", "logsumexp", *_INPUTS), results=3
)

MASK_ROWS = 512
"""Rows of one piece of a band: its mask has at most this many rows, and columns that no row of it sees are skipped."""


class CpuKernel:
    """Full, causal and banded blocks on CPU in float64 and float32; 16-bit inputs are computed in float32.

    The operator would take 16-bit tensors, but its backward sums dk and dv in 16 bits (three times the rounding error)
    and is an order of magnitude slower in float16. Its lse of a row that sees nothing is 0, so such rows are cut away.
    """

    name = "cpu"
    backward_needs: Literal["delta", "out"] = "out"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
        if torch.device(need.device).type != "cpu":
            return f"it runs on CPU, not on {need.device}"
        if need.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it computes float64, float32, bfloat16 and float16, not {need.dtype}"
        if need.heads % need.kv_heads:
            return f"heads ({need.heads}) must be a multiple of kv_heads ({need.kv_heads})"
        if need.head_dim != need.head_dim_v:
            return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
        return _FORWARD.refusal() or _BACKWARD.refusal()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Band, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockKernel.forward`."""
        piece_forward = functools.partial(_piece_forward, softmax_scale)
        out, lse = forward_by_pieces(_pieces(band, q, k), _wide(q), _wide(k), _wide(v), piece_forward)
        return out.to(q.dtype), lse

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
        """See `BlockKernel.backward`; reads `saved.out`. One thread owns a head, so it is deterministic."""
        assert saved.out is not None, "the cpu kernel reads out"
        piece_backward = functools.partial(_piece_backward, softmax_scale)
        wide = Saved(lse=saved.lse, out=_wide(saved.out))
        dq, dk, dv = backward_by_pieces(
            _pieces(band, q, k), _wide(dout), _wide(q), _wide(k), _wide(v), wide, piece_backward
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _piece_forward(
    softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[2] // k.shape[2]
    masking = _masking(band, q.shape[1], k.shape[1], q.dtype)
    parts = [
        _FORWARD(query=qx, key=kx, value=vx, dropout_p=0.0, scale=softmax_scale, **masking)
        for qx, kx, vx in zip(_merge_q(q, group), _merge_kv(k, group), _merge_kv(v, group), strict=True)
    ]
    out, lse = (_unfold([part[result] for part in parts], group) for result in (0, 1))
    return out.transpose(1, 2), lse


def _piece_backward(
    softmax_scale: float,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    band: Band,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert saved.out is not None
    group = q.shape[2] // k.shape[2]
    masking = _masking(band, q.shape[1], k.shape[1], q.dtype)
    lse = saved.lse.transpose(1, 2).unsqueeze(-1)
    by_rows = (_merge_q(x, group) for x in (dout, q, saved.out, lse))
    by_columns = (_merge_kv(x, group) for x in (k, v))
    parts = [
        _BACKWARD(
            grad_out=dout_x,
            query=q_x,
            key=k_x,
            value=v_x,
            out=out_x,
            logsumexp=lse_x.squeeze(-1),
            dropout_p=0.0,
            scale=softmax_scale,
            **masking,
        )
        for dout_x, q_x, out_x, lse_x, k_x, v_x in zip(*by_rows, *by_columns, strict=True)
    ]
    dq, dk, dv = (_unfold([part[result] for part in parts], group) for result in range(3))
    if group > 1:
        dk, dv = (torch.unflatten(x, 1, (k.shape[2], group)).sum(2) for x in (dk, dv))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in the accumulator dtype, its last dimension contiguous: the operator takes that for granted, unchecked."""
    x = x.to(accumulator_dtype(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _pieces(band: Band, q: torch.Tensor, k: torch.Tensor) -> list[Tile]:
    q_len, kv_len = q.shape[1], k.shape[1]
    rows = MASK_ROWS if form_of(band, q_len, kv_len) == "band" else q_len
    return list(cut_rows(tile_of(band, q_len, kv_len), rows))


def _masking(band: Band, q_len: int, kv_len: int, dtype: torch.dtype) -> dict[str, object]:
    """The operator's arguments for a band; its causal flag is aligned to the top left, so only square calls use it."""
    form = form_of(band, q_len, kv_len)
    if form != "band":
        return {"is_causal": form == "causal", "attn_mask": None}
    seen = visible(band, q_len, kv_len, torch.device("cpu"))
    assert seen is not None
    return {"is_causal": False, "attn_mask": torch.zeros(q_len, kv_len, dtype=dtype).masked_fill_(~seen, -math.inf)}


def _merge_q(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    """(batch, q_len, heads, dim) as the operator's (batch, heads, q_len, dim), views all.

    Grouped heads become, one batch entry at a time, (kv_heads, group, q_len, dim): the operator's batch is then a key
    and value head, which its group shares with stride 0 and no copy.
    """
    if group == 1:
        return [x.transpose(1, 2)]
    return [torch.unflatten(entry, 1, (-1, group)).permute(1, 2, 0, 3) for entry in x]


def _merge_kv(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    """(batch, kv_len, kv_heads, dim) to match `_merge_q`."""
    if group == 1:
        return [x.transpose(1, 2)]
    return [entry.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for entry in x]


def _unfold(parts: list[torch.Tensor], group: int) -> torch.Tensor:
    """What the operator gave, as (batch, heads, ...)."""
    return parts[0] if group == 1 else torch.stack([part.flatten(0, 1) for part in parts])
