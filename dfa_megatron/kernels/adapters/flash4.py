"""The flash4 kernel: FlashAttention-4 (flash-attn-4, `flash_attn.cute`), the fastest on Hopper, for any band."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved, Takes, uncut
from dfa_megatron.kernels.adapters.flash4_launches import has_memory, late_gradients, launches_seen
from dfa_megatron.kernels.adapters.shared import build_refusal, capability_text, dense, gpu_refusal, vectorised
from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.names import say_once
from dfa_megatron.plan.language.leaves import LeafSizes

logger = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
READ = "4.0.0b36"
"""The version whose source this adapter was written from; others are taken where the functions have these arguments."""

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_COMMON = (
    *("q", "k", "v", "softmax_scale", "softcap", "causal", "window_size_left", "window_size_right", "seqused_q"),
    *_LENGTHS,
)
_FORWARD = (*_COMMON, "return_lse", "out", "lse")
_BACKWARD = (*_COMMON, "out", "dout", "lse", "dlse", "deterministic", "dq", "dk", "dv")

Functions = tuple[Callable[..., Any], Callable[..., Any]]


class Flash4Kernel(BlockKernel):
    """bfloat16 and float16 on Hopper and data-centre Blackwell; grouped heads natively; deterministic on request.

    Its kernels are compiled at the first call of a shape class (dtype, head_dim, group, form): seconds each, once a
    process, or once a machine with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1. Calls are shrunk to the pairs of the band,
    so that no row is blind. The backward recomputes the probabilities from the global lse. It takes -delta as dlse,
    with an out of zeros, because the package computes rowsum(dout * out) - dlse.
    It caps scores with the hardware's approximate tanh (relative error up to 5e-4), one kernel for each softcap.
    """

    name = "flash4"
    backward_needs = "delta"
    takes_out = writes_into = True
    takes = Takes("window", uncut, skips=True)
    caps_scores = True

    def refusal(self, need: Need) -> str | None:
        if why := gpu_refusal(need):
            return why
        if need.capability is None or need.capability[0] not in (9, 10, 11):
            return f"it needs compute capability 9.x, 10.x or 11.x (Hopper, Blackwell), not {capability_text(need)}"
        if why := _head_dim_refusal(need):
            return why
        if why := build_refusal():
            return why
        found = _functions()
        return found if isinstance(found, str) else None

    def replays(self, *, deterministic: bool) -> bool:
        """See `BlockKernel.replays`: where the package keeps its compiled functions is known for one version."""
        if _version() not in ("", READ):
            said = "%s %s: its launches are not recorded, so calls take the host longer than with %s"
            say_once(logger.info, said, PACKAGE, _version(), READ)
        return _version() == READ

    def leaves(self, need: Need) -> LeafSizes | None:
        hopper = need.capability is not None and need.capability[0] == 9
        tried = hopper and need.head_dim == need.head_dim_v and need.head_dim in _SAME_BITS
        return LeafSizes(least=2048, usual=8192) if tried else None

    def launch(self, call: BlockCall) -> Partial:
        call = _varlen(call)
        with launches_seen():
            results = _loaded()[0](**_arguments("forward", call), return_lse=True, **_into(call, "out", "lse"))
        if call.segments.window is None:
            return results[0], results[1]
        return results[0].unsqueeze(0), results[1].unsqueeze(0)

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """See `BlockKernel.launch_backward`; a long call some heads at a time, for the package's accumulators."""
        call = _varlen(call)
        if call.segments.window is not None:
            return _packed_backward(call, dout, saved)
        lse, row, q, k, v = saved.lse, _row(saved), call.q, call.k, call.v
        passes = _passes(q, k)
        if passes == 1:
            known = _known(dout, lse, row) | _into(call, "dq", "dk", "dv")
            return _differentiate(**_arguments("backward", call), **known, deterministic=call.deterministic)
        into = call.into or (None, None, None)
        gradients = [x.new_empty(x.shape) if at is None else at for x, at in zip((q, k, v), into, strict=True)]
        by_heads = [x.chunk(passes, x.dim() - 2) for x in (dout, q, k, v, *gradients, lse, row)]
        for dout, q, k, v, dq, dk, dv, lse, row in zip(*by_heads, strict=True):
            arguments = _arguments("backward", replace(call, q=q, k=k, v=v)) | _known(dout, lse, row)
            _differentiate(**arguments, deterministic=call.deterministic, dq=dq, dk=dk, dv=dv)
        return gradients[0], gradients[1], gradients[2]


def _row(saved: Saved) -> torch.Tensor:
    """Return what the backward reads of each row beside lse: -delta, or out."""
    row = saved.out if saved.minus_delta is None else saved.minus_delta
    assert row is not None, "the flash4 kernel reads delta or out"
    return row


def _into(call: BlockCall, *names: str) -> dict[str, torch.Tensor]:
    """Return the memory of a call's results by the package's names; a varlen launch has no batch dimension."""
    varlen = call.segments.window is not None
    return {name: x[0] if varlen else x for name, x in zip(names, call.into, strict=False) if x is not None}


def _packed_backward(call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
    """Return the gradients of a varlen launch, whose tensors have no batch dimension."""
    known = _known(dout[0], saved.lse[0], _row(saved)[0]) | _into(call, "dq", "dk", "dv")
    dq, dk, dv = _differentiate(**_arguments("backward", call), **known, deterministic=call.deterministic)
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)


_SAME_BITS = (64, 128)
"""Head dims for which a segment was seen to have the same bits in any company, with the deterministic backward."""

_HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def _head_dim_refusal(need: Need) -> str | None:
    """Refuse more than the package does: only shapes whose backward was seen right, in READ, on long rows too.

    With grouped heads and head_dim 80 random cases on H200 found its dq, dk and dv wrong, where the compiler said
    nothing; 104 and 112 do not compile.
    """
    hopper = need.capability is not None and need.capability[0] == 9
    if need.head_dim != need.head_dim_v:
        if (need.head_dim, need.head_dim_v) == (192, 128) and need.heads == need.kv_heads:
            return None
        return (
            f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal "
            "(192 and 128 work without grouped heads)"
        )
    limit = 256 if hopper else 128  # at 256 its backward for Blackwell takes no delta
    if need.head_dim <= limit and need.head_dim in _HEAD_DIMS:
        return None
    if need.head_dim <= limit:
        known = ", ".join(map(str, _HEAD_DIMS))
        return f"its backward was seen right for head_dim {known}, and wrong for 80: {need.head_dim} is none of them"
    return f"head_dim {need.head_dim} is over {limit} on compute capability {capability_text(need)}"


@functools.cache
def _version() -> str:
    """Return the installed version, "" for none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _functions() -> Functions | str:
    """Return the package's forward and backward, or why they cannot be used, with the version found."""
    version = _version()
    if not version:
        return f"{PACKAGE} is not installed"
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # noqa: BLE001 -- its compiler's libraries are loaded at import, and fail in many ways
        return f"{PACKAGE} {version} cannot be imported ({type(error).__name__}: {error}); {READ} was seen working"
    found = []
    for name, arguments in (("_flash_attn_fwd", _FORWARD), ("_flash_attn_bwd", _BACKWARD)):
        function = getattr(interface, name, None)
        if function is None:
            return f"{PACKAGE} {version} has no {name}; {READ} has"
        parameters = inspect.signature(function).parameters
        if missing := [argument for argument in arguments if argument not in parameters]:
            return f"{name} of {PACKAGE} {version} has no argument {', '.join(missing)}; that of {READ} has"
        needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        if unknown := needed - set(arguments):
            return f"{name} of {PACKAGE} {version} needs {', '.join(sorted(unknown))}; that of {READ} does not"
        found.append(function)
    return found[0], found[1]


def _passes(q: torch.Tensor, k: torch.Tensor) -> int:
    """Return how many calls, some kv heads each, keep the package's accumulators within `_ACCUMULATORS`."""
    passes, kv_heads = 1, k.shape[2]
    accumulated = q.numel() + (2 * k.numel() if q.shape[2] > kv_heads else 0)
    while _WORD * accumulated > passes * _ACCUMULATORS and kv_heads % (2 * passes) == 0:
        passes *= 2
    return passes


_ACCUMULATORS = 768 << 20
"""Bytes of gradients in float32, beside those in the inputs' dtype: dq of 32K rows of 32 heads of 128 is 512 MiB. Two
calls in place of one cost 1 to 2.6 % of a backward at 32K rows, where this allows one, and at most 0.6 % at 64K.
"""

_WORD = 4


def _known(dout: torch.Tensor, lse: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the backward's arguments from the forward, with or without a batch dimension; row: -delta, or out."""
    dout = vectorised(dout)
    if row.dim() == dout.dim():
        return {"dout": dout, "lse": dense(lse), "out": vectorised(row)}
    nothing = _zeros(dout.shape[-1], dout.dtype, dout.device, stream_of(dout.device)).expand_as(dout)
    return {"dout": dout, "lse": dense(lse), "out": nothing, "dlse": dense(row)}


@functools.lru_cache(maxsize=64)
def _zeros(width: int, dtype: torch.dtype, device: torch.device, _stream: int) -> torch.Tensor:
    return torch.zeros(width, dtype=dtype, device=device)


def _arguments(phase: str, call: BlockCall) -> dict[str, Any]:
    """Return the arguments that forward and backward share.

    None is no bound, and a right bound of 0 alone is the package's causal kernel. q, k and v of a varlen launch have no
    batch dimension.
    """
    q, k, v, segments, band = call.q, call.k, call.v, call.segments, call.segments.band
    left, right = band.left, band.right
    _tell_compilation(phase, call)
    arguments = {
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "causal": left < 0 and right == 0,
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
    }
    if segments.window is not None:
        q, k, v = q[0], k[0], v[0]
        arguments |= _lengths(segments, q.device)
    return arguments | {"q": vectorised(q), "k": vectorised(k), "v": vectorised(v)}


def _varlen(call: BlockCall) -> BlockCall:
    """Return the same call as a varlen launch where rows that one block might hold would compile another kernel."""
    segments = call.segments
    is_short = min(segments.q_len, segments.kv_len) < _BLOCKS
    if segments.window is not None or not (segments.ragged and is_short) or call.q.shape[0] > 1:
        return call
    if "varlen" not in segments.tables:
        segments.tables["varlen"] = replace(segments, window=segments.band, tables={})
    return replace(call, segments=segments.tables["varlen"])


def _lengths(segments: Segments, device: torch.device) -> dict[str, Any]:
    """Return the lengths of a varlen launch.

    Where the longest segment fits one of its blocks, the package would compile another kernel.
    """
    cu_q, cu_k, used = segments.offsets(device)
    return {
        "seqused_q": used,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max(segments.max_q, _BLOCKS),
        "max_seqlen_k": max(segments.max_kv, _BLOCKS),
    }


_BLOCKS = 512
"""More rows than the package has in one block."""


def _differentiate(**arguments: Any) -> Gradients:
    """Call the package's backward, whose gradients get their memory late where its launches are known."""
    free = _version() == READ and arguments.keys().isdisjoint(("dq", "dk", "dv"))
    late = late_gradients(*(arguments[x] for x in "qkv")) if free else {}
    with launches_seen(late=bool(late)):
        results = _loaded()[1](**arguments, **late)
    if not all(map(has_memory, late.values())):
        raise RuntimeError(f"{PACKAGE} {READ} has launched nothing that writes its gradients")
    return results[0], results[1], results[2]


def _loaded() -> Functions:
    found = _functions()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _tell_compilation(phase: str, call: BlockCall) -> None:
    """Say once for each shape class why the first call takes seconds."""
    band = call.segments.band
    exact = "deterministic " if call.deterministic and phase == "backward" else ""
    what = f"{'packed ' if call.segments.window is not None else ''}{exact}{phase}"
    if call.softcap:
        what += " with capped scores"
    if band.left < 0:
        form = "causal" if band.right == 0 else "full" if band.right < 0 else "right-bounded"
    else:
        form = "windowed"
    (*_, heads, head_dim), (*_, kv_heads, head_dim_v) = call.q.shape, call.v.shape
    head_dims = f"{head_dim}" + (f" and {head_dim_v}" if head_dim_v != head_dim else "")
    dtype = str(call.q.dtype).removeprefix("torch.")
    said = "flash4 compiles its %s for %s, head_dim %s, %d query heads a kv head, on first use (some seconds)"
    say_once(logger.info, said, f"{form} {what}", dtype, head_dims, heads // kv_heads)
