"""The aten kernel: FlashAttention-2 as built into PyTorch, for any band."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch

from dfa_megatron.kernels.adapters.gpu import build_refusal, capability_text, deterministic_algorithms, gpu_refusal
from dfa_megatron.kernels.adapters.operators import Operator
from dfa_megatron.kernels.adapters.strides import dense, vectorised
from dfa_megatron.kernels.api import Need, Saved
from dfa_megatron.kernels.bands import InPieces, cut_tall
from dfa_megatron.kernels.packed import Options, backward_by_groups, forward_by_groups, loop_backward, loop_forward
from dfa_megatron.kernels.segments import Group, Segments, Table
from dfa_megatron.plan.language.geometry import FULL, Band, Tile

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


class AtenFlashKernel(InPieces):
    """bfloat16 and float16 on CUDA from Ampere on; grouped heads natively; deterministic on request.

    Its window is aligned to the bottom right like `Band` (flash_api.cpp). Calls are shrunk first, since it gives an lse
    of +inf for a row that sees nothing, and cut where rows outnumber columns (see `cut_tall`).
    """

    name = "aten"
    backward_needs: Literal["delta", "out"] = "out"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
        if why := gpu_refusal(need):
            return why
        if need.head_dim != need.head_dim_v:
            return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
        if need.head_dim > 256:
            return f"head_dim {need.head_dim} is over 256"
        if need.head_dim > 192 and need.capability is not None and (8, 6) <= need.capability <= (8, 9):
            return f"its backward has no head_dim over 192 on compute capability {capability_text(need)}"
        return build_refusal() or _build_refusal() or _FORWARD.refusal() or _BACKWARD.refusal()

    def pieces(self, tile: Tile | None) -> list[Tile]:
        """See `cut_tall`."""
        return list(cut_tall(tile))

    def piece_forward(
        self, softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        results = _FORWARD(
            query=vectorised(q), key=vectorised(k), value=vectorised(v), return_debug_mask=False,
            **_common(q, k, band, softmax_scale),
        )  # fmt: skip
        return results[0], results[1]

    def piece_backward(
        self,
        softmax_scale: float,
        deterministic: bool,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        band: Band,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        return _run_backward(deterministic, dout, q, k, v, saved, _common(q, k, band, softmax_scale))

    def forward_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, segments: Segments, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenKernel.forward_segments`: a call for each window."""
        if not _packs():
            return loop_forward(self, q, k, v, segments=segments, softmax_scale=softmax_scale)
        return forward_by_groups(q, k, v, segments, functools.partial(_group_forward, softmax_scale))

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
        """See `VarlenKernel.backward_segments`: a call for each window."""
        if not _packs():
            options = Options(softmax_scale=softmax_scale, deterministic=deterministic)
            return loop_backward(self, dout, q, k, v, saved, segments=segments, **options)
        group_backward = functools.partial(_group_backward, softmax_scale, deterministic)
        return backward_by_groups(dout, q, k, v, saved, segments, group_backward)


def _run_backward(
    deterministic: bool,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    common: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert saved.out is not None, "the aten kernel reads out"
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the dropout's random state
    with deterministic_algorithms(deterministic):
        dq, dk, dv = _BACKWARD(
            grad_out=dense(dout),
            query=vectorised(q),
            key=vectorised(k),
            value=vectorised(v),
            out=dense(saved.out),
            logsumexp=dense(saved.lse),  # read by its address, strides unseen
            rng_state=unused,
            unused=unused,
            **common,
        )
    return dq, dk, dv


def _group_forward(
    softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    results = _FORWARD(
        query=vectorised(q), key=vectorised(k), value=vectorised(v), return_debug_mask=False,
        **_packed(group, table, softmax_scale),
    )  # fmt: skip
    return results[0], results[1]


def _group_backward(
    softmax_scale: float,
    deterministic: bool,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    group: Group,
    table: Table,
) -> tuple[torch.Tensor, ...]:
    return _run_backward(deterministic, dout, q, k, v, saved, _packed(group, table, softmax_scale))


def _packed(group: Group, table: Table, softmax_scale: float) -> dict[str, Any]:
    """What forward and backward of a group share; q, k and v are (rows, heads, head_dim).

    max_k = 1 selects PyTorch's decoding path, which returns lse in another layout, so pass at least 2. A right bound of
    max_k or more is read as none, and no right bound beside a left one as a bound of max_k (flash_api.cpp). Both are
    wrong where rows outnumber columns, so pass more than the bound, and at least the longest q_len.
    """
    window = group.window
    right = window.right + 1 if window.right >= 0 else group.max_q if window.left >= 0 else 0
    return {
        "cum_seq_q": table.cu_q,
        "cum_seq_k": table.cu_kv,
        "max_q": max(group.max_q, 2),
        "max_k": max(group.max_kv, 2, right),
        **_windowed(window, softmax_scale),
    }


def _common(q: torch.Tensor, k: torch.Tensor, band: Band, softmax_scale: float) -> dict[str, Any]:
    """What forward and backward share; without cumulative lengths q, k and v are (batch, length, heads, head_dim)."""
    return {
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": q.shape[1],
        "max_k": k.shape[1],
        **_windowed(band, softmax_scale),
    }


def _windowed(band: Band, softmax_scale: float) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "is_causal": band.left < 0 and band.right == 0,
        "scale": softmax_scale,
        "window_size_left": band.left if band.left >= 0 else None,
        "window_size_right": band.right if band.right >= 0 else None,
    }


@functools.cache
def _packs() -> bool:
    """This PyTorch gives the lse of packed rows as (heads, rows), not padded for each document: what its meta says."""
    q = torch.empty(2, 1, 8, dtype=torch.bfloat16, device="meta")
    edges = torch.tensor([0, 1, 2], dtype=torch.int32)
    results = _FORWARD(
        query=q, key=q, value=q, cum_seq_q=edges, cum_seq_k=edges, max_q=2, max_k=2, return_debug_mask=False,
        **_windowed(FULL, 1.0),
    )  # fmt: skip
    lse: torch.Tensor = results[1]
    if lse.dim() != 2:
        logger.warning("PyTorch %s packs no rows: the aten kernel takes a call for each document", torch.__version__)
    return lse.dim() == 2


def _build_refusal() -> str | None:
    built = torch.backends.cuda.is_flash_attention_available()
    return None if built else f"PyTorch {torch.__version__} is built without FlashAttention"
