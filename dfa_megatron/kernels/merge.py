"""Partials of one query chunk fold: merging normalised (out, lse) pairs is associative, with (0, -inf) as identity."""

from __future__ import annotations

import functools
import logging
import math

import torch

from dfa_megatron.kernels.triton_support import interpreted, triton_refusal

logger = logging.getLogger(__name__)

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def open_(acc_out: torch.Tensor, acc_lse: torch.Tensor) -> None:
    """Set an accumulator to the identity: out 0, lse -inf, the partial that has seen no key."""
    acc_out.zero_()
    acc_lse.fill_(-math.inf)


def merge_(acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the partial (out, lse) into the accumulator (acc_out, acc_lse), in place.

    acc_out (batch, rows, heads, head_dim) and acc_lse (batch, heads, rows) in float32 or float64, views allowed; out
    and lse have their shapes, in any dtype. A side whose lse is -inf weighs exactly 0, and -inf on both sides leaves 0
    and -inf. NaN is passed on, never hidden. Source: the online softmax (Milakov and Gimelshein 2018) in normalised
    form, O += sigmoid(L' - L) (O' - O), L = log(exp L + exp L'). On CUDA one Triton kernel does it where it can.
    """
    if _fusable(acc_out, acc_lse, out, lse):
        from dfa_megatron.kernels import triton_merge

        triton_merge.merge(acc_out, acc_lse, out, lse, acc_out)
        return
    _merge_by_operations(acc_out, acc_lse, out, lse)


def finish(
    acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, into: torch.Tensor
) -> None:
    """Merge the last partial: `into`, of acc_out's shape and any dtype, gets the out, and acc_lse becomes the lse.

    Nothing may be read from acc_out afterwards.
    """
    if _fusable(acc_out, acc_lse, out, lse) and into.stride(-1) == 1 and into.dtype in _FUSED_DTYPES:
        from dfa_megatron.kernels import triton_merge

        triton_merge.merge(acc_out, acc_lse, out, lse, into)
        return
    _merge_by_operations(acc_out, acc_lse, out, lse)
    into.copy_(acc_out)


def _merge_by_operations(acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    lse = lse.to(acc_lse.dtype)
    gap = (lse - acc_lse).masked_fill_(lse == -math.inf, -math.inf)  # -inf - -inf would be NaN
    weight = torch.sigmoid_(gap).transpose(1, 2).unsqueeze(-1)
    acc_out.lerp_(out.to(acc_out.dtype), weight)
    torch.logaddexp(acc_lse, lse, out=acc_lse)


def _fusable(acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """The Triton kernel takes these tensors, and has shown on this device that it works."""
    return (
        (acc_out.is_cuda or interpreted())
        and acc_out.dtype == acc_lse.dtype == torch.float32
        and out.dtype in _FUSED_DTYPES
        and lse.dtype in _FUSED_DTYPES
        and acc_out.stride(-1) == out.stride(-1) == 1
        and _works(acc_out.device)
    )


@functools.cache
def _works(device: torch.device) -> bool:
    """Compile the kernel once and compare it: no C compiler or an odd driver makes merging slower, not impossible."""
    why = triton_refusal()
    if why is None:
        try:
            why = _difference(device)
        except Exception as error:  # noqa: BLE001 -- Triton's compiler and launcher raise anything
            why = f"Triton failed: {type(error).__name__}: {error}"
    if why is not None:
        logger.warning("partials are merged by PyTorch's operations on %s, which is slower: %s", device, why)
    return why is None


def _difference(device: torch.device) -> str | None:
    """Merge a few rows both ways, with -inf on either side and on both."""
    from dfa_megatron.kernels import triton_merge

    rows = torch.arange(4 * 6 * 8, dtype=torch.float32, device=device)
    acc_out, out = torch.sin(rows).view(1, 4, 6, 8), torch.cos(rows).view(1, 4, 6, 8)
    acc_lse, lse = (4 * torch.sin(rows[k : k + 24]).view(1, 6, 4) for k in (0, 24))
    acc_lse[0, :2] = lse[0, 1:3] = -math.inf
    want, want_lse = acc_out.clone(), acc_lse.clone()
    _merge_by_operations(want, want_lse, out, lse)
    triton_merge.merge(acc_out, acc_lse, out, lse, acc_out)
    same = torch.allclose(acc_out, want, rtol=1e-5, atol=1e-6) and torch.allclose(acc_lse, want_lse, rtol=1e-5)
    return None if same else "the Triton kernel's numbers are wrong here"
