"""The short convolutions of Megatron's mixers, by causal-conv1d, FLA or PyTorch, as `dist_conv` takes them.

Each returned function maps (batch, tokens, channels) and local offsets of documents to the convolved tokens; a weight
is (channels, width).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from dfa_megatron.recurrence import Convolve
from dfa_megatron.runtime.cu_seqlens import Offsets

logger = logging.getLogger("dfa_megatron.megatron")

Kernel = Callable[..., Any]


def by_causal_conv1d(kernel: Kernel | None, weight: torch.Tensor, bias: Any) -> Convolve:
    """Return causal-conv1d's convolution with SiLU, or PyTorch's where that package is missing."""
    if kernel is None:
        _say_missing()
        return by_pytorch(weight, bias)
    convolve = kernel

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        ids = None
        if documents:
            lengths = torch.tensor(_lengths(documents, x))
            ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None].to(x.device)
        # With ids the channels must lie next to each other, as they do in x.
        out: torch.Tensor = convolve(x=x.mT, weight=weight, bias=bias, seq_idx=ids, activation="silu")
        return out.mT

    return run


def by_fla(kernel: Kernel, weight: torch.Tensor, bias: Any, activation: str) -> Convolve:
    """Return FLA's convolution."""

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        offsets = {"cu_seqlens": torch.tensor(documents, device=x.device)} if documents else {}
        out: torch.Tensor = kernel(x=x, weight=weight, bias=bias, activation=activation, **offsets)[0]
        return out

    return run


def by_pytorch(weight: torch.Tensor, bias: Any) -> Convolve:
    """Return PyTorch's convolution with SiLU."""
    channels, width = weight.shape

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        parts = [F.pad(part, (width - 1, 0)) for part in x.mT.split(_lengths(documents, x), 2)]
        out = torch.cat([F.conv1d(part, weight[:, None], bias, groups=channels) for part in parts], 2)
        return F.silu(out).mT

    return run


def _lengths(documents: Offsets, x: torch.Tensor) -> list[int]:
    return [hi - lo for lo, hi in pairwise(documents or (0, x.shape[1]))]


@functools.cache
def _say_missing() -> None:
    logger.warning("dfa: causal-conv1d is not installed, so the short convolutions of mixers run in PyTorch")
