"""Sketches: rows of a tensor projected onto a few random directions, so that whole tensors need not be kept."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

DIRECTIONS = 8


@functools.lru_cache(maxsize=64)
def _directions(columns: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(columns)
    directions = torch.randn(columns, DIRECTIONS, generator=draw, dtype=torch.float64)
    return directions.div_(DIRECTIONS**0.5).to(device)


def sketch(x: torch.Tensor) -> torch.Tensor:
    """Return (rows, 8) of (rows, ...), float64 on the CPU, with nearly the lengths of the rows; a vector is one row."""
    x = x.detach()
    rows = x.reshape(1, -1) if x.dim() < 2 else x.flatten(1)
    wide = rows.double() if rows.numel() < 1 << 24 else rows.float()  # what is large is slow in float64 on a GPU
    return (wide @ _directions(rows.shape[1], x.device).to(wide.dtype)).double().cpu()


def noisy(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return x with noise as large as the rounding of its dtype, and the same for its gradient, drawn from a name."""
    noised: torch.Tensor = _Noise.apply(x, zlib.crc32(name.encode()))  # type: ignore[no-untyped-call]
    return noised


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
        ctx.seed = seed
        return _rounded(x, seed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rounded(gradient, ctx.seed + 1), None


def _rounded(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return x with normal noise: eps times the size of each row's entries."""
    draw = torch.Generator(x.device).manual_seed(seed)
    wide = x.float() if x.dtype.itemsize < 4 else x
    size = wide.square().mean(-1, keepdim=True).sqrt() * torch.finfo(x.dtype).eps
    return (wide + size * torch.randn(x.shape, generator=draw, device=x.device, dtype=wide.dtype)).to(x.dtype)
