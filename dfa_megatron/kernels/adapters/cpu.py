"""The CPU kernel: PyTorch's fused attention for CPU, which takes and gives the lse, with bands through small masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved, Takes, accumulator_dtype
from dfa_megatron.kernels.adapters.shared import Operator
from dfa_megatron.kernels.segments import visible
from dfa_megatron.plan.language.geometry import Span, Tile, form_of
from dfa_megatron.plan.language.leaves import LeafSizes

_INPUTS = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")
_FORWARD = Operator("aten::_scaled_dot_product_flash_attention_for_cpu", _INPUTS, results=2)
_BACKWARD = Operator(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", ("grad_out", "out", "logsumexp", *_INPUTS), results=3
)

MASK_ROWS = 512
"""Rows of one tile of a band: its mask has at most this many rows, and columns that no row of it sees are skipped."""


def _cut(tile: Tile) -> Iterable[Tile]:
    """Cut a band into tiles whose masks are small."""
    return cut_rows(tile, MASK_ROWS) if form_of(tile.band, len(tile.q), len(tile.kv)) == "band" else (tile,)


def cut_rows(tile: Tile, rows: int) -> Iterator[Tile]:
    """Cut into tiles of at most `rows` rows, each shrunk to the columns that its rows see."""
    for start in range(tile.q.lo, tile.q.hi, rows):
        cut = tile.restrict(Span(start, start + rows), tile.kv)
        assert cut is not None, "a shrunk tile has no empty row"
        yield cut


class CpuKernel(BlockKernel):
    """Full, causal and banded calls on CPU in float64 and float32; 16-bit inputs are computed in float32.

    The operator would take 16-bit tensors. But its backward sums dk and dv in 16 bits (three times the rounding error)
    and is an order of magnitude slower in float16. Its lse of a row that sees nothing is 0, so such rows are cut away.
    """

    name = "cpu"
    backward_needs = "out"
    takes = Takes("segment", _cut)

    def refusal(self, need: Need) -> str | None:
        if torch.device(need.device).type != "cpu":
            return f"it runs on CPU, not on {need.device}"
        if need.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it computes float64, float32, bfloat16 and float16, not {need.dtype}"
        if need.head_dim != need.head_dim_v:
            return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
        return _FORWARD.refusal() or _BACKWARD.refusal()

    def leaves(self, need: Need) -> LeafSizes:
        return LeafSizes(least=16, usual=512)

    def forward(self, call: BlockCall) -> Partial:
        out, lse = super().forward(_wide_call(call))
        return out.to(call.q.dtype), lse

    def backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """See `BlockKernel.backward`. One thread owns a head, so it is deterministic."""
        assert saved.out is not None, "the cpu kernel reads out"
        wide = Saved(saved.lse, out=_wide(saved.out))
        dq, dk, dv = super().backward(_wide_call(call), _wide(dout), wide)
        return dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)

    def replays(self, *, deterministic: bool) -> bool:
        return True

    def launch(self, call: BlockCall) -> Partial:
        group, dim = call.q.shape[2] // call.k.shape[2], call.q.shape[3]
        if call.deterministic:
            call = _aligned_call(call)
        out, lse, *_ = _FORWARD(**_inputs(call, group))
        return _narrowed(_joined(out, call).transpose(1, 2), dim), _joined(lse, call)

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        assert saved.out is not None
        group, dim, out = call.q.shape[2] // call.k.shape[2], call.q.shape[3], saved.out
        if call.deterministic:
            call, dout, out = _aligned_call(call), _aligned(dout), _aligned(out)
        dq, dk, dv = _BACKWARD(
            grad_out=_by_query_head(dout, group),
            out=_by_query_head(out, group),
            logsumexp=saved.lse if group == 1 else saved.lse.unflatten(1, (-1, group)).flatten(0, 1),
            **_inputs(call, group),
        )
        if group > 1:
            dk, dv = (x.unflatten(0, (len(call.k), -1)).sum(2) for x in (dk, dv))
        dq, dk, dv = (_narrowed(x.transpose(1, 2), dim) for x in (_joined(dq, call), dk, dv))
        return dq, dk, dv


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in the accumulator dtype, its last dimension contiguous: the operator assumes that, unchecked."""
    x = x.to(accumulator_dtype(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide_call(call: BlockCall) -> BlockCall:
    return replace(call, q=_wide(call.q), k=_wide(call.k), v=_wide(call.v), into=())


def _aligned_call(call: BlockCall) -> BlockCall:
    """Return a call with q, k and v `_aligned`."""
    return replace(call, q=_aligned(call.q), k=_aligned(call.k), v=_aligned(call.v))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x (batch, rows, heads, dim) in dense memory of its own, with zeros up to a multiple of 16 numbers a row.

    The bits of MKL's products may depend on where rows begin and how far apart they are; on AMD's processors they do.
    """
    batch, rows, heads, dim = x.shape
    found = x.new_zeros(batch, heads, rows, dim + -dim % 16)
    found[..., :dim] = x.transpose(1, 2)
    return found.transpose(1, 2)


def _narrowed(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if x.shape[3] == dim else x[..., :dim].contiguous()


def _inputs(call: BlockCall, group: int) -> dict[str, object]:
    """Return the operators' common arguments; the causal flag is aligned to the top left: for square calls only."""
    given = {
        "query": _by_query_head(call.q, group),
        "key": _by_kv_head(call.k, group),
        "value": _by_kv_head(call.v, group),
        "dropout_p": 0.0,
        "scale": call.softmax_scale,
    }
    segments = call.segments
    form = form_of(segments.band, segments.q_len, segments.kv_len)
    if form != "band":
        return given | {"is_causal": form == "causal", "attn_mask": None}
    seen = visible(segments.band, segments.q_len, segments.kv_len, torch.device("cpu"))
    assert seen is not None
    mask = torch.zeros(seen.shape, dtype=call.q.dtype, device="cpu").masked_fill_(~seen, -math.inf)
    return given | {"is_causal": False, "attn_mask": mask}


def _by_query_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return (batch, q_len, heads, dim) as the operator's (batch, heads, q_len, dim).

    Grouped heads become (batch * kv_heads, group, q_len, dim), a view of one sequence and a copy of several: the
    operator's batch is then a key and value head, which its group shares with stride 0.
    """
    if group == 1:
        return x.transpose(1, 2)
    grouped: torch.Tensor = x.unflatten(2, (-1, group))
    return grouped.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _by_kv_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return (batch, kv_len, kv_heads, dim) to match `_by_query_head`."""
    if group == 1:
        return x.transpose(1, 2)
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1)


def _joined(x: torch.Tensor, call: BlockCall) -> torch.Tensor:
    """Return a result of query heads as (batch, heads, ...)."""
    batch, _, heads, _ = call.q.shape
    return x if x.shape[1] == heads else x.unflatten(0, (batch, -1)).flatten(1, 2)
