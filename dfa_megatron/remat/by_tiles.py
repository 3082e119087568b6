"""Compute a tile of tokens at a time what treats each token alone; the backward computes each tile once more.

Sequence tiling of ALST (arXiv 2506.13996). A tile's inner activations exist while the tile is computed. All tiles are
in one graph, so the gradients of weights are summed before anything sees them: hooks of ZeRO and FSDP run once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Result = TypeVar("Result")


def by_tiles(
    run: Callable[[torch.Tensor], Result], x: torch.Tensor, rows: int, *, dim: int = 0, random: bool = False
) -> list[Result]:
    """Return the result of each tile, in order.

    Args:
        run: treats each index of `dim` alone.
        x: is cut along `dim`.
        rows: of a tile, at least 1; the last one may be smaller.
        random: `run` draws random numbers, which the backward must draw again.
    """
    parts = x.split(rows, dim)
    return [torch_checkpoint(run, part, use_reentrant=False, preserve_rng_state=random) for part in parts]
