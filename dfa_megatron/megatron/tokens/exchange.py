"""Move the rows of a sequence-first tensor between Megatron's orders and contiguous slices, in one all-to-all.

Shapes: a tensor here is (rows, ...). The rows are this rank's tokens: length / CP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.document_order import DocumentOrder, RowOrder
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between, spans_of
from dfa_megatron.sharding import positions_of

TokenOrder = Literal["contiguous", "zigzag"] | Layout | DocumentOrder | RowOrder


def positions(layout: str | Layout | DocumentOrder | RowOrder, length: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the global positions of a rank's tokens, int64 (local tokens,), in local order."""
    if isinstance(layout, (DocumentOrder, RowOrder)):
        return layout.positions(ranks, rank)
    return positions_of(by_name(layout, length, ranks) if isinstance(layout, str) else layout, rank)


_KEPT = 16
"""Plans of a group that are kept, there and back: packs rarely come again, and one holds 32 bytes of a token."""


def plan_exchange(
    source: TokenOrder, target: TokenOrder, length: int, ranks: int, member: int, device: torch.device | None = None
) -> Moves:
    """Return the exchange of one of the ranks."""
    held, wanted = ([spans_of(positions(order, length, ranks, r)) for r in range(ranks)] for order in (source, target))
    return moves_between(held, wanted, member, device)


class Relayout:
    """Exchange rows between layouts over one group; plans are made once per length and pack.

    Args:
        group: the ranks that share the sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.member = group, dist.get_world_size(group), dist.get_rank(group)
        self._plans: dict[tuple[TokenOrder, TokenOrder, int, torch.device], Moves] = {}

    def move(self, rows: torch.Tensor, source: TokenOrder, target: TokenOrder) -> torch.Tensor:
        """Return this rank's rows (local rows, ...) in the target layout, given its rows in the source; no autograd."""
        return rows if (moves := self._moves(rows, source, target)) is None else moves.run(rows, self.group)

    def __call__(self, rows: torch.Tensor, source: TokenOrder, target: TokenOrder) -> torch.Tensor:
        """Move rows like `move`, and gradients in the other direction."""
        return rows if (moves := self._moves(rows, source, target)) is None else move_rows(rows, moves, self.group)

    def _moves(self, rows: torch.Tensor, source: TokenOrder, target: TokenOrder) -> Moves | None:
        if self.ranks == 1 or source == target:
            return None
        count, device = rows.shape[0], rows.device
        plan = self._plans.get((source, target, count, device))
        if plan is None:
            while len(self._plans) > _KEPT - 2:
                del self._plans[next(iter(self._plans))]
            plan = plan_exchange(source, target, count * self.ranks, self.ranks, self.member, device)
            self._plans[source, target, count, device] = plan
            self._plans[target, source, count, device] = plan.back()
        return plan


def in_order(relayout: Relayout, tokens: int, source: TokenOrder, table: torch.Tensor) -> torch.Tensor:
    """Return the contiguous counterpart of a table (tokens, ...) in order `source`.

    Raises:
        UnsupportedError: the first dimension of the table is not the tokens of this rank.
    """
    if table.shape[0] != tokens:
        raise UnsupportedError(
            f"a rotary table of shape {tuple(table.shape)} for {tokens} tokens of a rank",
            "its first dimension must be these tokens, because they change places",
            "a table (tokens, 1, 1, rotary_dim) or a tuple of such, or --dfa-data-layout zigzag",
        )
    return relayout.move(table, source, "contiguous")


class TableCache:
    """Cache the rows of rotary tables for this rank's tokens: make them once for a table, not once per layer.

    The key is a table's storage, because activation checkpoints pass new tensor objects over the same memory. An entry
    whose source is gone gives up its copy, but not its place: all ranks see the same tables in the same order, and must
    agree on the exchanges, while each frees memory when it likes.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self._entries: dict[tuple[Any, ...], torch.Tensor | None] = {}

    @torch.inference_mode(False)  # training saves it for its backward
    def rows(self, table: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Return what `make` makes of a table, or of each member of a tuple; what is no table stays."""
        if isinstance(table, (tuple, list)):
            return tuple(self.rows(member, make) for member in table)
        if not isinstance(table, torch.Tensor):
            return table
        memory = StorageWeakRef(table.untyped_storage())
        key = (memory, table.storage_offset(), tuple(table.shape), table.dtype)
        if key not in self._entries:
            self._entries.update(dict.fromkeys(old for old in self._entries if old[0].expired()))
            if len(self._entries) >= self.capacity:
                del self._entries[next(iter(self._entries))]
            with torch.no_grad():
                self._entries[key] = make(table.detach())
        return self._entries[key]
