"""The flash4 kernel: FlashAttention-4 (flash-attn-4, `flash_attn.cute`), the fastest on Hopper, for any band."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from dfa_megatron.kernels.adapters.gpu import build_refusal, capability_text, gpu_refusal
from dfa_megatron.kernels.adapters.strides import dense, vectorised
from dfa_megatron.kernels.api import Capping, Need, Saved
from dfa_megatron.kernels.bands import InPieces
from dfa_megatron.kernels.packed import backward_by_groups, forward_by_groups
from dfa_megatron.kernels.segments import Group, Segments, Table
from dfa_megatron.plan.language.geometry import Band

logger = logging.getLogger(__name__)

PACKAGE = "flash-attn-4"
READ = "4.0.0b36"
"""The version whose source this adapter was written from; others are taken where the functions have these arguments."""

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_COMMON = ("q", "k", "v", "softmax_scale", "softcap", "causal", "window_size_left", "window_size_right", *_LENGTHS)
_FORWARD = (*_COMMON, "return_lse")
_BACKWARD = (*_COMMON, "out", "dout", "lse", "dlse", "deterministic", "dq", "dk", "dv")

Functions = tuple[Callable[..., Any], Callable[..., Any]]
Scaling = dict[str, float]
"""softmax_scale and softcap, 0 for none."""


class Flash4Kernel(Capping, InPieces):
    """bfloat16 and float16 on Hopper and data-centre Blackwell; grouped heads natively; deterministic on request.

    Its kernels are compiled at the first call of a shape class (dtype, head_dim, group, form): seconds each, once a
    process, or once a machine with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1. Calls are shrunk to the pairs of the band,
    so that no row is blind. The backward takes the global lse, from which it computes the probabilities anew, and
    delta: the package computes rowsum(dout * out) - dlse itself, so it is given an out of zeros and dlse = -delta.
    It caps scores with the hardware's approximate tanh (relative error up to 5e-4), one kernel for each softcap.
    """

    name = "flash4"
    backward_needs: Literal["delta", "out"] = "delta"

    def _scaling(self, softmax_scale: float) -> Scaling:
        return {"softmax_scale": softmax_scale, "softcap": self.softcap}

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
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

    def piece_forward(
        self, softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        call = _call("forward", q, k, v, band, self._scaling(softmax_scale))
        results = _loaded()[0](**call, return_lse=True)
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
        """See `InPieces`; long ones some heads at a time, for the memory of the package's accumulators."""
        what = "deterministic backward" if deterministic else "backward"
        passes = _passes(q, k)
        if passes == 1:
            call = _call(what, q, k, v, band, self._scaling(softmax_scale))
            results = _loaded()[1](**call, **_known(dout, saved), deterministic=deterministic)
            return results[0], results[1], results[2]
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        split = [x.chunk(passes, 2) for x in (dout, q, k, v, *gradients)]
        for (dout, q, k, v, dq, dk, dv), part in zip(zip(*split, strict=True), _by_heads(saved, passes), strict=True):
            call = _call(what, q, k, v, band, self._scaling(softmax_scale))
            _loaded()[1](**call, **_known(dout, part), deterministic=deterministic, dq=dq, dk=dk, dv=dv)
        return gradients

    def forward_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, segments: Segments, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `VarlenKernel.forward_segments`: a call for each window."""
        return forward_by_groups(q, k, v, segments, functools.partial(_group_forward, self._scaling(softmax_scale)))

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
        group_backward = functools.partial(_group_backward, self._scaling(softmax_scale), deterministic)
        return backward_by_groups(dout, q, k, v, saved, segments, group_backward)


_HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def _head_dim_refusal(need: Need) -> str | None:
    """Narrower than the package's own checks: only shapes whose backward was seen right, in READ, on long rows too.

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
def _functions() -> Functions | str:
    """The forward and the backward of the package, or why they cannot be used, with the version found."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
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
    """Calls, each of some kv heads and their queries', that keep the package's accumulators within `_ACCUMULATORS`."""
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


def _by_heads(saved: Saved, passes: int) -> list[Saved]:
    """What is saved of the rows, for as many heads at a time as `passes` leaves."""

    def split(x: torch.Tensor | None, dim: int) -> Sequence[torch.Tensor | None]:
        return [None] * passes if x is None else x.chunk(passes, dim)

    fields = (saved.lse.chunk(passes, 1), split(saved.delta, 1), split(saved.out, 2))
    return [Saved(lse, delta=delta, out=out) for lse, delta, out in zip(*fields, strict=True)]


def _known(dout: torch.Tensor, saved: Saved) -> dict[str, torch.Tensor | None]:
    """What the backward takes of the rows' forward, with or without a batch dimension."""
    dout, lse = vectorised(dout), dense(saved.lse)
    if saved.delta is not None:
        nothing = dout.new_zeros(dout.shape[-1]).expand_as(dout)
        return {"dout": dout, "lse": lse, "out": nothing, "dlse": -dense(saved.delta)}
    assert saved.out is not None, "one of delta and out is saved"
    return {"dout": dout, "lse": lse, "out": dense(saved.out), "dlse": None}


def _group_forward(
    scaling: Scaling, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, table: Table
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call("packed forward", q, k, v, group.window, scaling)
    results = _loaded()[0](**call, **_lengths(group, table), return_lse=True)
    return results[0], results[1]


def _group_backward(
    scaling: Scaling,
    deterministic: bool,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    saved: Saved,
    group: Group,
    table: Table,
) -> tuple[torch.Tensor, ...]:
    what = "deterministic packed backward" if deterministic else "packed backward"
    call = _call(what, q, k, v, group.window, scaling)
    results = _loaded()[1](**call, **_lengths(group, table), **_known(dout, saved), deterministic=deterministic)
    return results[0], results[1], results[2]


def _lengths(group: Group, table: Table) -> dict[str, Any]:
    """A group's segments; where the longest fits one of its blocks the package would compile another kernel."""
    return {
        "cu_seqlens_q": table.cu_q,
        "cu_seqlens_k": table.cu_kv,
        "max_seqlen_q": max(group.max_q, _BLOCKS),
        "max_seqlen_k": max(group.max_kv, _BLOCKS),
    }


_BLOCKS = 512
"""More rows than the package has in one block."""


def _call(what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, scaling: Scaling) -> dict[str, Any]:
    """What forward and backward share; None is no bound, and a right bound of 0 alone is its causal kernel."""
    _tell_compilation(
        what + (" with capped scores" if scaling["softcap"] else ""),
        str(q.dtype),
        q.shape[-1],
        v.shape[-1],
        q.shape[-2] // k.shape[-2],
        band.left < 0,
        band.right,
    )
    return {
        "q": vectorised(q),
        "k": vectorised(k),
        "v": vectorised(v),
        **scaling,
        "causal": band.left < 0 and band.right == 0,
        "window_size_left": band.left if band.left >= 0 else None,
        "window_size_right": band.right if band.right >= 0 else None,
    }


def _loaded() -> Functions:
    found = _functions()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _tell_compilation(
    what: str, dtype: str, head_dim: int, head_dim_v: int, group: int, no_left: bool, right: int
) -> None:
    """Say once for each shape class why the first call takes seconds."""
    form = ("causal" if right == 0 else "full" if right < 0 else "right-bounded") if no_left else "windowed"
    _log_once(what, dtype.removeprefix("torch."), head_dim, head_dim_v, group, form)


@functools.lru_cache(maxsize=256)
def _log_once(what: str, dtype: str, head_dim: int, head_dim_v: int, group: int, form: str) -> None:
    head_dims = f"{head_dim}" + (f" and {head_dim_v}" if head_dim_v != head_dim else "")
    logger.info(
        "flash4 compiles its %s %s for %s, head_dim %s, %d query heads a kv head, on first use (some seconds)",
        form, what, dtype, head_dims, group,
    )  # fmt: skip
