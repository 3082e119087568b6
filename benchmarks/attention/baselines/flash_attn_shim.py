"""The functions of the flash_attn package that peers import, on PyTorch's FlashAttention-2; for benchmarks only.

ring-flash-attn and yunchang import names of the package flash-attn 2, which has to be compiled for hours where there is
no wheel. PyTorch carries the same kernels. Here are these names over our `aten` kernel (on a CPU, `cpu`), which calls
them. One thing differs: a backward returns tensors of its own, which are copied to where the package would have
written.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from benchmarks.attention.local import KernelAttention
from dfa_megatron import kernels
from dfa_megatron.kernels.adapters import aten
from dfa_megatron.kernels.adapters.strides import dense, vectorised
from dfa_megatron.kernels.api import BlockKernel, Saved
from dfa_megatron.kernels.packed import backward, forward
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import Band, Segment

INTERFACE = "flash_attn.flash_attn_interface"
NOTES = {
    "cuda": "on PyTorch's FlashAttention-2 in place of the package flash-attn",
    "cpu": "on PyTorch's CPU attention in place of the package flash-attn",
}


def install(device: str) -> str:
    """Make `import flash_attn` work for peers; says what their blocks run on."""
    try:
        if importlib.import_module(INTERFACE).__name__ == __name__:
            return NOTES[device]
        return f"on flash-attn {importlib.import_module('flash_attn').__version__}"
    except ImportError:
        pass
    try:
        package = importlib.import_module("flash_attn")  # a folder with flash-attn-4 in it
    except ImportError:
        package = sys.modules["flash_attn"] = ModuleType("flash_attn")
        package.__path__ = []
        package.__spec__ = ModuleSpec("flash_attn", None, is_package=True)
    here: Any = package
    here.__version__ = "2.8.3"  # whose signatures these are
    here.flash_attn_func = flash_attn_func
    here.flash_attn_interface = sys.modules[INTERFACE] = sys.modules[__name__]
    return NOTES[device]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """The public function of the package, without dropout, softcap and ALiBi."""
    _refuse(dropout_p, softcap, alibi_slopes)
    band = Band(window_size[0], 0 if causal else window_size[1])
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    out: torch.Tensor = KernelAttention.apply(q, k, v, _kernel(q), band, scale)  # type: ignore[no-untyped-call]
    return out


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    _refuse(dropout_p, softcap, alibi_slopes)
    band = Band(window_size_left, 0 if causal else window_size_right)
    out, lse = _kernel(q).forward(q, k, v, band=band, softmax_scale=softmax_scale)
    return out, lse, None, None


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> None:
    _refuse(dropout_p, softcap, alibi_slopes)
    gradients = _kernel(q).backward(
        dout,
        q,
        k,
        v,
        Saved(softmax_lse, out=out),
        band=Band(window_size_left, 0 if causal else window_size_right),
        softmax_scale=softmax_scale,
        deterministic=deterministic,
    )
    for place, gradient in zip((dq, dk, dv), gradients, strict=True):
        place.copy_(gradient)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    _refuse(dropout_p, softcap, alibi_slopes)
    if not q.is_cuda:
        segments = _segments(cu_seqlens_q, cu_seqlens_k, causal, window_size_left, window_size_right)
        out, lse = forward(_kernel(q), q[None], k[None], v[None], segments=segments, softmax_scale=softmax_scale)
        return out[0], lse[0], None, None
    common = _common(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        (window_size_left, window_size_right),
    )  # fmt: skip
    results = aten._FORWARD(**common, return_debug_mask=False)
    return results[0], results[1], None, None


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    _refuse(dropout_p, softcap, alibi_slopes)
    if not q.is_cuda:
        segments = _segments(cu_seqlens_q, cu_seqlens_k, causal, window_size_left, window_size_right)
        saved = Saved(softmax_lse[None], out=out[None])
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "deterministic": deterministic}
        parts = backward(_kernel(q), dout[None], q[None], k[None], v[None], saved, segments=segments, **options)
        gradients = tuple(part[0] for part in parts)
    else:
        common = _common(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            (window_size_left, window_size_right),
        )  # fmt: skip
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        gradients = aten._BACKWARD(
            **common,
            grad_out=dense(dout),
            out=dense(out),
            logsumexp=dense(softmax_lse),
            rng_state=unused,
            unused=unused,
        )
    for place, gradient in zip((dq, dk, dv), gradients, strict=True):
        place.copy_(gradient)


def _common(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> dict[str, Any]:
    """The arguments of PyTorch's operators over several documents: the offsets stay where they are, nothing waits."""
    left, right = window_size
    return {
        "query": vectorised(q),
        "key": vectorised(k),
        "value": vectorised(v),
        "cum_seq_q": cu_seqlens_q,
        "cum_seq_k": cu_seqlens_k,
        "max_q": max(max_seqlen_q, 2),  # 1 would be its path for decoding
        "max_k": max(max_seqlen_k, 2),
        "dropout_p": 0.0,
        "is_causal": causal,
        "scale": softmax_scale,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }


def _segments(cu_q: torch.Tensor, cu_k: torch.Tensor, causal: bool, left: int, right: int) -> Segments:
    """The documents of a call, for our kernels; on a CPU their offsets are at hand."""
    band, edges = Band(left, 0 if causal else right), zip(cu_q.tolist(), cu_k.tolist(), strict=True)
    parts = [Segment(q0, q1, k0, k1, band) for (q0, k0), (q1, k1) in pairwise(edges)]
    return Segments(tuple(parts), parts[-1].q_hi, parts[-1].kv_hi)


def _kernel(q: torch.Tensor) -> BlockKernel:
    return kernels.get("aten" if q.is_cuda else "cpu")


def _refuse(dropout_p: float, softcap: float, alibi_slopes: torch.Tensor | None) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError("dropout, softcap and ALiBi")
