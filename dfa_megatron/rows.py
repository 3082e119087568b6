"""Rows of a batch that have other documents or masks: as one sequence for attention, one by one for what moves tokens.

Row b's tokens come behind those of the rows before it. So a batch is a pack: plans and kernels know nothing of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import Layout, of_rows
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, balancing_mask, check_offsets, check_rows, rows_of
from dfa_megatron.runtime.request import Inputs, refuse_strangers, refuse_tensors

F = TypeVar("F", bound=Callable[..., Any])


def row_by_row(function: F) -> F:
    """Let a function of (batch, ...) take the documents of every row: it is called with each row by itself."""

    @wraps(function)
    def by_row(x: torch.Tensor, *args: Any, cu_seqlens: CuSeqlens = None, **options: Any) -> Any:
        if not (rows := rows_of(cu_seqlens, x)):
            return function(x, *args, cu_seqlens=cu_seqlens, **options)
        each = zip(x.split(1), rows, strict=True)
        return torch.cat([function(row, *args, cu_seqlens=offsets, **options) for row, offsets in each])

    return by_row  # type: ignore[return-value]


def join(
    inputs: Inputs, rows: tuple[Mask | Offsets, ...], layout: str | Layout, ranks: int
) -> tuple[Inputs, Mask | Offsets, Layout]:
    """Return the tensors of a batch as those of one sequence, what its tokens attend to, and its layout.

    Raises:
        UnsupportedError: the tensors or the rows do not fit together.
    """
    refuse_strangers(*inputs[:3])
    refuse_tensors(inputs)
    check_rows(rows, inputs.q)
    joined, whole = join_rows(rows, layout, ranks)
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in inputs[:3])
    return Inputs(q, k, v, inputs.sinks), joined, whole


@lru_cache(maxsize=16)  # the layers of a batch bring equal rows
def join_rows(rows: tuple[Mask | Offsets, ...], layout: str | Layout, ranks: int) -> tuple[Mask | Offsets, Layout]:
    """Return what the tokens of one sequence attend to, and its layout, as `join` does.

    layout: of a row. "load_balanced" shares out every row by its own work, as many tokens of each to a rank.
    """
    offsets = [row for row in rows if not isinstance(row, Mask)]
    for row in offsets:
        check_offsets(row)
    masks = [row if isinstance(row, Mask) else balancing_mask(row, row[-1]) for row in rows]
    length, queries = masks[0].length, masks[0].queries
    if any((mask.length, mask.queries) != (length, queries) for mask in masks):
        what, why = f"rows of {[mask.length for mask in masks]} tokens", "the rows of a batch are equally long"
        raise UnsupportedError(what, why, "the padding of a row as a document of its own")
    whole = of_rows([layout if isinstance(layout, Layout) else layout_of(layout, mask, ranks) for mask in masks])
    if offsets:
        return tuple(at * length + offset for at, row in enumerate(offsets) for offset in row), whole
    own, tiles = length if queries is None else queries, list[Any]()
    for at, mask in enumerate(masks):
        by = at * own if queries is None else (len(rows) - 1) * own + at * (length - own)
        tiles += [tile.shift(at * own, by) for tile in mask.tiles]
    return Mask(
        f"rows({', '.join(mask.name for mask in masks)})", whole.length, tuple(tiles), queries=whole.queries
    ), whole
