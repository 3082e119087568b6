"""Move the rows of a sequence-first tensor between Megatron's orders and contiguous slices, in one all-to-all.

Shapes: a tensor here is (rows, ...). The rows are this rank's tokens: length / CP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.megatron.tokens.document_order import DocumentOrder, RowOrder
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.sharding import positions_of

TokenOrder = Literal["contiguous", "zigzag"] | DocumentOrder | RowOrder


def positions(layout: str | DocumentOrder | RowOrder, length: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the global positions of a rank's tokens, int64 (length / ranks,), in local order."""
    if not isinstance(layout, str):
        return layout.positions(ranks, rank)
    return positions_of(by_name(layout, length, ranks), rank)


_KEPT = 16
"""Plans of a group that are kept, there and back: packs rarely come again, and one holds 32 bytes of a token."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Hold the rows that one member sends and the places of received rows; rows travel in token order."""

    send_rows: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    arrived_rows: torch.Tensor
    """For every row of the result, its row in the receive buffer."""

    def to(self, device: torch.device) -> ExchangePlan:
        """Return the same with its rows on a device."""
        send, arrived = self.send_rows.to(device), self.arrived_rows.to(device)
        return ExchangePlan(send, self.send_counts, self.receive_counts, arrived)

    def back(self) -> ExchangePlan:
        """Return the exchange in the other direction; rows travel in token order there too."""
        send, arrived = torch.argsort(self.arrived_rows), torch.argsort(self.send_rows)
        return ExchangePlan(send, self.receive_counts, self.send_counts, arrived)


def plan_exchange(source: TokenOrder, target: TokenOrder, length: int, ranks: int, member: int) -> ExchangePlan:
    """Return the exchange of one of the ranks."""
    tokens_of = {
        layout: torch.stack([positions(layout, length, ranks, rank) for rank in range(ranks)])
        for layout in (source, target)
    }

    def order(mine: TokenOrder, theirs: TokenOrder) -> tuple[torch.Tensor, list[int]]:
        owner = torch.empty(length, dtype=torch.int64)
        owner[tokens_of[theirs].flatten()] = torch.arange(ranks).repeat_interleave(length // ranks)
        here = tokens_of[mine][member]
        peer = owner[here]
        return torch.argsort(peer * length + here), torch.bincount(peer, minlength=ranks).tolist()

    send_rows, send_counts = order(source, target)
    filled, receive_counts = order(target, source)
    return ExchangePlan(send_rows, send_counts, receive_counts, torch.argsort(filled))


class Relayout:
    """Exchange rows between layouts over one group; plans are made once per length and pack.

    Args:
        group: the ranks that share the sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.member = group, dist.get_world_size(group), dist.get_rank(group)
        self._plans: dict[tuple[TokenOrder, TokenOrder, int, torch.device], ExchangePlan] = {}

    def move(self, rows: torch.Tensor, source: TokenOrder, target: TokenOrder) -> torch.Tensor:
        """Return this rank's rows (local rows, ...) in the target layout, given its rows in the source; no autograd."""
        if self.ranks == 1 or source == target:
            return rows
        count, device = rows.shape[0], rows.device
        plan = self._plans.get((source, target, count, device))
        if plan is None:
            while len(self._plans) > _KEPT - 2:
                del self._plans[next(iter(self._plans))]
            plan = plan_exchange(source, target, count * self.ranks, self.ranks, self.member).to(device)
            self._plans[source, target, count, device] = plan
            self._plans[target, source, count, device] = plan.back()
        outgoing = rows.index_select(0, plan.send_rows)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, plan.receive_counts, plan.send_counts, group=self.group)
        return incoming.index_select(0, plan.arrived_rows)

    def __call__(self, rows: torch.Tensor, source: TokenOrder, target: TokenOrder) -> torch.Tensor:
        """Move rows like `move`, and gradients in the other direction."""
        if self.ranks == 1 or source == target:
            return rows
        out: torch.Tensor = _Exchange.apply(rows, self, source, target)  # type: ignore[no-untyped-call]
        return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, relayout: Relayout, source: TokenOrder, target: TokenOrder
    ) -> torch.Tensor:
        ctx.relayout, ctx.source, ctx.target = relayout, source, target
        return relayout.move(rows, source, target)

    @staticmethod
    @differentiable_once("rows that change their layout")
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.relayout.move(gradients[0], ctx.target, ctx.source), None, None, None


class TableCache:
    """Cache rotary tables in the contiguous layout: exchange each table once, not once per layer.

    The key is a table's storage, because activation checkpoints pass new tensor objects over the same memory. An entry
    whose source is gone gives up its copy, but not its place: all ranks see the same tables in the same order, and must
    agree on the exchanges, while each frees memory when it likes.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity = capacity
        self._entries: dict[tuple[Any, ...], torch.Tensor | None] = {}

    @torch.inference_mode(False)  # training saves it for its backward
    def contiguous(self, table: Any, relayout: Relayout, rows: int, source: TokenOrder = "zigzag") -> Any:
        """Return the contiguous counterpart of a table (rows, ...) in order `source`, or of each member of a tuple.

        Raises:
            UnsupportedError: the first dimension of a table is not the rows of this rank.
        """
        if isinstance(table, (tuple, list)):
            return tuple(self.contiguous(member, relayout, rows, source) for member in table)
        if not isinstance(table, torch.Tensor):
            return table
        if table.shape[0] != rows:
            raise UnsupportedError(
                f"a rotary table of shape {tuple(table.shape)} for {rows} tokens of a rank",
                "its first dimension must be these tokens, because they change places",
                "a table (tokens, 1, 1, rotary_dim) or a tuple of such, or --dfa-data-layout zigzag",
            )
        memory = StorageWeakRef(table.untyped_storage())
        key = (memory, table.storage_offset(), tuple(table.shape), table.dtype)
        if key not in self._entries:
            self._entries.update(dict.fromkeys(old for old in self._entries if old[0].expired()))
            if len(self._entries) >= self.capacity:
                del self._entries[next(iter(self._entries))]
            with torch.no_grad():
                self._entries[key] = relayout.move(table.detach(), source, "contiguous")
        return self._entries[key]
