"""Merging partials: (out, lse) pairs merge, gradients add; both associative, both straight into the dtype wanted."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import torch

from dfa_megatron.kernels import Partial, accumulator_dtype
from dfa_megatron.kernels.current_stream import interpreted
from dfa_megatron.kernels.segments import Rows
from dfa_megatron.kernels.tape import unrecorded

logger = logging.getLogger(__name__)

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def identity_(out: torch.Tensor, lse: torch.Tensor) -> None:
    """Set a partial to the identity of the merge: out 0, lse -inf, as of rows that see no key."""
    out.zero_()
    lse.fill_(-math.inf)


def merge(parts: Sequence[Partial], into: Partial) -> None:
    """Merge up to four normalised partials of the same rows.

    `into` is one of the parts, tensor for tensor, or memory of its own. Any dtypes; the arithmetic is float32, float64
    where any of them is. A part whose lse is -inf weighs exactly 0, and -inf everywhere leaves 0 and -inf. NaN is
    passed on, never hidden. Source: the online softmax (Milakov and Gimelshein 2018) in normalised form,
    L = log(sum of exp L_i), O = sum of exp(L_i - L) O_i. On CUDA one Triton kernel does it where it can.
    """
    tensors = [x for part in (*parts, into) for x in part]
    if _fusable(*tensors):
        from dfa_megatron.kernels.triton import merge as triton_merge

        if all(triton_merge.takes(*part) for part in (*parts, into)):
            triton_merge.merge(parts, into)
            return
    _merge_by_operations(parts, into)


def weights_of(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of partials, which lie along the first dimension of `lses`, and the merged lse."""
    lse = torch.logsumexp(lses, 0)
    return torch.exp(lses - lse).masked_fill_(lses == -math.inf, 0.0), lse  # -inf - -inf would be NaN


def add(parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Write the sum of up to four parts, (batch, rows, heads, dim) each, to `into`, rounded once.

    `into` is one of the parts, or memory of its own.
    """
    if _fusable(*parts, into) and all(x[0].is_contiguous() for x in (*parts, into)):  # the rows of each sequence
        from dfa_megatron.kernels.triton import merge as triton_merge

        triton_merge.add(parts, into)
        return
    high = _high(*parts, into)
    total = parts[0] if parts[0] is into and into.dtype == high else parts[0].to(high, copy=True)
    for part in parts[1:]:
        total += part
    if total is not into:
        into.copy_(total)


def sum_rows(x: torch.Tensor, rows: Rows, into: torch.Tensor) -> None:
    """Write to each row of `into` the sum of its copies in x, rounded once, in a fixed order; 0 for a row without any.

    x (1, copies, heads, dim), into (1, rows, heads, dim), both contiguous.
    """
    if _fusable(x, into):
        from dfa_megatron.kernels.triton import merge as triton_merge

        triton_merge.sum_rows(x.contiguous(), rows.sources(x.device), into)
        return
    high = _high(x, into)
    total = torch.zeros_like(into, dtype=high)
    total.index_add_(1, rows.indices(x.device), x.to(high))
    into.copy_(total)


def fill_if(flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write NaN, or -1, over tensors if the flag, int32 on their device, is not 0."""
    from dfa_megatron.kernels.triton.support import triton_refusal

    if triton_refusal() is None and all(x.is_contiguous() for x in tensors):
        from dfa_megatron.kernels.triton import fills

        fills.fill_if(flag, tensors)
        return
    for x in tensors:
        nothing = 255 if x.dtype == torch.uint8 else -1
        x.masked_fill_(flag != 0, math.nan if x.is_floating_point() else nothing)


def _high(*tensors: torch.Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _merge_by_operations(parts: Sequence[Partial], into: Partial) -> None:
    high = _high(*(x for part in (*parts, into) for x in part))
    weights, lse = weights_of(torch.stack([lse.to(high) for _, lse in parts]))
    total = torch.zeros(into[0].shape, dtype=high, device=into[0].device)
    for (out, _), weight in zip(parts, weights, strict=True):
        total.addcmul_(out.to(high), weight.transpose(1, 2).unsqueeze(-1))
    into[0].copy_(total)
    into[1].copy_(lse)


def _fusable(*tensors: torch.Tensor) -> bool:
    """Return whether the Triton kernels take these tensors and were seen to work on this device."""
    device = tensors[0].device
    return (
        (device.type == "cuda" or interpreted()) and all(x.dtype in _FUSED_DTYPES for x in tensors) and _works(device)
    )


@functools.cache
def _works(device: torch.device) -> bool:
    """Compile the kernels once and compare: no C compiler or an odd driver makes merging slower, not impossible."""
    from dfa_megatron.kernels.triton.support import triton_refusal

    why = triton_refusal()
    if why is None:
        try:
            with unrecorded():
                why = _difference(device)
        except Exception as error:  # noqa: BLE001 -- Triton's compiler and launcher raise anything
            why = f"Triton failed: {type(error).__name__}: {error}"
    if why is not None:
        logger.warning("partials are merged by PyTorch's operations on %s, which is slower: %s", device, why)
    return why is None


def _difference(device: torch.device) -> str | None:
    """Merge a few rows both ways, with -inf on either side and on both."""
    from dfa_megatron.kernels.triton import merge as triton_merge

    rows = torch.arange(4 * 6 * 8, dtype=torch.float32, device=device)
    out, other = torch.sin(rows).view(1, 4, 6, 8), torch.cos(rows).view(1, 4, 6, 8)
    lse, other_lse = (4 * torch.sin(rows[k : k + 24]).view(1, 6, 4) for k in (0, 24))
    lse[0, :2] = other_lse[0, 1:3] = -math.inf
    want, got = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    _merge_by_operations([want, (other, other_lse), (out, lse)], want)
    triton_merge.merge([got, (other, other_lse), (out, lse)], got)
    same = torch.allclose(got[0], want[0], rtol=1e-5, atol=1e-6) and torch.allclose(got[1], want[1], rtol=1e-5)
    total = torch.empty_like(out)
    triton_merge.add([out, other], total)
    return None if same and torch.equal(total, out + other) else "the Triton kernels' numbers are wrong here"


def minus_delta(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return -delta = -rowsum(dout * out), (batch, heads, rows) in the accumulator dtype (paper, section 3.2)."""
    if _fusable(dout, out) and dout.stride(-1) == out.stride(-1) == 1:
        from dfa_megatron.kernels.triton import merge as triton_merge

        return triton_merge.minus_delta(dout, out)
    high = accumulator_dtype(dout.dtype)
    return (dout.to(high) * out.to(high)).sum(-1).neg_().transpose(1, 2).contiguous()
