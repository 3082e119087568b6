"""Rows that move from rank to rank in one all-to-all, and their gradients back in another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.runtime.comm.compared import Compared

_NOTHING = Compared()


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows that one rank sends, and where those that it receives go; rows travel in token order.

    sent, received: rows of its tensor, and of the result. send_counts, receive_counts: of them, for each rank.
    rows: of its tensor, and of the result.
    """

    sent: torch.Tensor
    received: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    rows: tuple[int, int]

    def back(self) -> Moves:
        """Return the moves in the other direction."""
        return Moves(self.received, self.sent, self.receive_counts, self.send_counts, self.rows[::-1])

    def run(self, x: torch.Tensor, group: dist.ProcessGroup | None, fill: float = 0) -> torch.Tensor:
        """Return the rows of the result, `fill` in those that nobody sends; no autograd. x: (rows, ...)."""
        outgoing = x.index_select(0, self.sent)
        incoming = outgoing
        if group is not None and group.size() > 1:
            incoming = outgoing.new_empty(len(self.received), *x.shape[1:])
            dist.all_to_all_single(
                _bytes(incoming), _bytes(outgoing), self.receive_counts, self.send_counts, group=group
            )
        if len(self.received) == self.rows[1]:
            result = x.new_empty(self.rows[1], *x.shape[1:])
        else:
            result = x.new_full((self.rows[1], *x.shape[1:]), fill)
        return result.index_copy_(0, self.received, incoming)


def moves_between(
    held: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], rank: int, device: torch.device | None = None
) -> Moves:
    """Return the moves of one of the ranks, with its rows on a device.

    Args:
        held: for every rank, the global position of each of its tokens, int64; together each position once.
        wanted: for every rank, the position of the token that comes to each row, or -1; each position at most once.
    """
    length = sum(map(len, held))

    def order(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        owner = torch.full((length + 1,), -1)  # the last stands for position -1 of `wanted`, which nobody holds
        ranks = torch.arange(len(theirs)).repeat_interleave(torch.tensor([len(x) for x in theirs]))
        owner[torch.cat(list(theirs))] = ranks
        peer = owner[mine[rank]]
        rows = (peer >= 0).nonzero().squeeze(1)
        rows = rows[torch.argsort(peer[rows] * length + mine[rank][rows])]
        return rows.to(device), torch.bincount(peer[rows], minlength=len(theirs)).tolist()

    sent, send_counts = order(held, wanted)
    received, receive_counts = order(wanted, held)
    return Moves(sent, received, send_counts, receive_counts, (len(held[rank]), len(wanted[rank])))


def move_rows(
    x: torch.Tensor,
    moves: Moves,
    group: dist.ProcessGroup | None,
    fill: float = 0,
    exchange: Compared = _NOTHING,
) -> torch.Tensor:
    """Run moves like `Moves.run`, and those of gradients back. exchange: compares the ranks' calls."""
    found: torch.Tensor = _MovedRows.apply(x, moves, group, fill, exchange)  # type: ignore[no-untyped-call]
    return found


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        moves: Moves,
        group: dist.ProcessGroup | None,
        fill: float,
        exchange: Compared,
    ) -> torch.Tensor:
        ctx.moves, ctx.group, ctx.exchange = moves, group, exchange
        with exchange.running(0, x.device):
            return moves.run(x, group, fill)

    @staticmethod
    @differentiable_once("rows that move between ranks")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.exchange.running(1, gradient.device):
            return ctx.moves.back().run(gradient, ctx.group), None, None, None, None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return (rows, bytes): backends support different dtypes, but all support bytes."""
    return x.view(len(x), math.prod(x.shape[1:])).view(torch.uint8)
