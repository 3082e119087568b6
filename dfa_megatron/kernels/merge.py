"""Partials of one query chunk fold: merging normalised (out, lse) pairs is associative, with (0, -inf) as identity."""

from __future__ import annotations

import math

import torch


def open_(acc_out: torch.Tensor, acc_lse: torch.Tensor) -> None:
    """Set an accumulator to the identity: out 0, lse -inf, the partial that has seen no key."""
    acc_out.zero_()
    acc_lse.fill_(-math.inf)


def merge_(acc_out: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the partial (out, lse) into the accumulator (acc_out, acc_lse), in place.

    acc_out (batch, rows, heads, head_dim) and acc_lse (batch, heads, rows) in float32 or float64, views allowed; out
    and lse have their shapes, in any dtype. A side whose lse is -inf weighs exactly 0, and -inf on both sides leaves 0
    and -inf. NaN is passed on, never hidden. Source: the online softmax (Milakov and Gimelshein 2018) in normalised
    form, O += sigmoid(L' - L) (O' - O), L = log(exp L + exp L').
    """
    lse = lse.to(acc_lse.dtype)
    gap = (lse - acc_lse).masked_fill_(lse == -math.inf, -math.inf)  # -inf - -inf would be NaN
    weight = torch.sigmoid_(gap).transpose(1, 2).unsqueeze(-1)
    acc_out.lerp_(out.to(acc_out.dtype), weight)
    torch.logaddexp(acc_lse, lse, out=acc_lse)
