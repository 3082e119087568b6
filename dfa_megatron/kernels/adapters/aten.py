"""The aten kernel: FlashAttention-2 as built into PyTorch, for any band."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved, Takes
from dfa_megatron.kernels.adapters.shared import (
    Operator,
    build_refusal,
    capability_text,
    dense,
    deterministic_algorithms,
    equal_dims_refusal,
    vectorised,
)
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import FULL, UNBOUNDED, Segment, Span, Tile

logger = logging.getLogger(__name__)

_INPUTS = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
    "dropout_p", "is_causal", "scale", "window_size_left", "window_size_right",
)  # fmt: skip
_FORWARD = Operator("aten::_flash_attention_forward", (*_INPUTS, "return_debug_mask"), results=2)
_BACKWARD = Operator(
    "aten::_flash_attention_backward",
    (*_INPUTS, "grad_out", "out", "logsumexp", "rng_state|philox_seed", "unused|philox_offset"),
    results=3,
)


def cut_tall(whole: Tile) -> Iterator[Tile]:
    """Cut into at most three tiles, each of them full or with no more rows than columns.

    FlashAttention-2 ignores a right bound of kv_len or more, and adds a right bound of kv_len to a left bound that
    stands alone. Both change the result only if rows outnumber columns. The right bound hides pairs only in the first
    kv_len - 1 rows, the left bound only in the last kv_len - 1. So cut those rows off; the middle is full.
    """
    tile: Tile | None = whole
    while tile is not None:
        columns = len(tile.kv)
        if tile.band.is_full or len(tile.q) <= columns:
            yield tile
            return
        cut = tile.q.lo + columns if tile.hi != UNBOUNDED else tile.q.hi - columns  # tile.hi bounds j - i
        head = tile.restrict(Span(tile.q.lo, cut), tile.kv)
        assert head is not None, "a shrunk tile has no empty row"
        yield head
        tile = tile.restrict(Span(cut, tile.q.hi), tile.kv)


class AtenFlashKernel(BlockKernel):
    """bfloat16 and float16 on CUDA from Ampere on; grouped heads natively; deterministic on request.

    Its window is aligned to the bottom right like `Band` (flash_api.cpp). Calls are shrunk first, since it gives an lse
    of +inf for a row that sees nothing, and cut where rows outnumber columns (see `cut_tall`).
    """

    name = "aten"
    backward_needs = "out"

    def refusal(self, need: Need) -> str | None:
        if why := equal_dims_refusal(need):
            return why
        if need.head_dim > 192 and need.capability is not None and (8, 6) <= need.capability <= (8, 9):
            return f"its backward has no head_dim over 192 on compute capability {capability_text(need)}"
        if build_refusal() is None and not torch.backends.cuda.is_flash_attention_available():
            return f"PyTorch {torch.__version__} is built without FlashAttention"
        return build_refusal() or _FORWARD.refusal() or _BACKWARD.refusal()

    @property
    def takes(self) -> Takes:  # type: ignore[override]
        return Takes("window" if _packs() else "segment", cut_tall)

    def replays(self, *, deterministic: bool) -> bool:
        """See `BlockKernel.replays`; determinism is a setting around its operator."""
        return not deterministic

    def launch(self, call: BlockCall) -> Partial:
        results = _FORWARD(return_debug_mask=False, **_arguments(call))
        if call.segments.window is None:
            return results[0], results[1]
        return results[0].unsqueeze(0), results[1].unsqueeze(0)

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        lse, out = saved.lse, saved.out
        assert out is not None, "the aten kernel reads out"
        varlen = call.segments.window is not None
        if varlen:
            dout, out, lse = dout[0], out[0], lse[0]
        unused = torch.empty((), dtype=torch.int64, device=call.q.device)  # the dropout's random state
        with deterministic_algorithms(call.deterministic):
            dq, dk, dv = _BACKWARD(
                grad_out=dense(dout),
                out=dense(out),
                logsumexp=dense(lse),  # read by its address, strides unseen
                rng_state=unused,
                unused=unused,
                **_arguments(call),
            )
        return (dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)) if varlen else (dq, dk, dv)


def _arguments(call: BlockCall) -> dict[str, Any]:
    """Return the arguments that forward and backward share.

    q, k and v are (batch, length, heads, head_dim), and (rows, heads, head_dim) of a varlen launch. There max_k = 1
    selects PyTorch's decoding path, which returns lse in another layout, so pass at least 2. A right bound of max_k or
    more is read as none, and no right bound beside a left one as a bound of max_k (flash_api.cpp). Both are wrong where
    rows outnumber columns, so pass more than the bound, and at least the longest q_len.
    """
    segments, band = call.segments, call.segments.band
    q, k, v = call.q, call.k, call.v
    cu_q = cu_k = None
    max_q, max_k = segments.q_len, segments.kv_len
    if segments.window is not None:
        q, k, v = q[0], k[0], v[0]
        cu_q, cu_k, _ = segments.offsets(q.device)
        right = band.right + 1 if band.right >= 0 else segments.max_q if band.left >= 0 else 0
        max_q, max_k = max(segments.max_q, 2), max(segments.max_kv, 2, right)
    return {
        "query": vectorised(q),
        "key": vectorised(k),
        "value": vectorised(v),
        "cum_seq_q": cu_q,
        "cum_seq_k": cu_k,
        "max_q": max_q,
        "max_k": max_k,
        "dropout_p": 0.0,
        "is_causal": band.left < 0 and band.right == 0,
        "scale": call.softmax_scale,
        "window_size_left": band.left if band.left >= 0 else None,
        "window_size_right": band.right if band.right >= 0 else None,
    }


@functools.cache
def _packs() -> bool:
    """Ask the operator's meta function whether the lse of packed rows is (heads, rows), not padded per document."""
    q = torch.empty(1, 2, 1, 8, dtype=torch.bfloat16, device="meta")
    two = Segments((Segment(0, 1, 0, 1, FULL), Segment(1, 2, 1, 2, FULL)), 2, 2, window=FULL)
    lse: torch.Tensor = _FORWARD(return_debug_mask=False, **_arguments(BlockCall(q, q, q, two, 1.0)))[1]
    if lse.dim() != 2:
        logger.warning("PyTorch %s packs no rows: the aten kernel takes a call for each document", torch.__version__)
    return lse.dim() == 2
