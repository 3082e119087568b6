"""Ulysses inside a plan: groups of consecutive ranks exchange heads for tokens, and the plan runs over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.geometry import Span
from dfa_megatron.plan.layout import by_name
from dfa_megatron.runtime.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS

_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read q, k and v where they landed."""

Kind = tuple[int, int, torch.dtype]
"""(heads, width, dtype) of a field of a packet."""


def check_degree(degree: int, ranks: int, heads: int) -> None:
    """Refuse a degree that does not divide the ranks of the group and the query heads of each.

    Raises:
        UnsupportedError: says which degrees would work.
    """
    works = [str(d) for d in range(1, ranks + 1) if ranks % d == 0 and heads % d == 0]
    instead = f"a degree that divides both {ranks} ranks and {heads} heads: {', '.join(works)}"
    if degree < 1 or ranks % degree:
        raise UnsupportedError(
            f"ulysses_degree={degree} on a group of {ranks} ranks", "the degree must divide the ranks", instead
        )
    if heads % degree:
        raise UnsupportedError(
            f"ulysses_degree={degree} with {heads} heads", "every rank must get as many heads as the others", instead
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Who computes which heads of which tokens, as numbers only: ranks can agree on it before anything moves.

    degree: ranks that exchange heads with each other.
    rank, ranks: this rank in the whole group, and the group's size.
    heads, kv_heads: of one rank's part of the plan.
    copies: in how many places each of the caller's kv heads is; more than 1 where several ranks have query heads of it.
    pieces: (rank of the exchange, its rows) in the order of the sequence; () where that is the order of the ranks.
    """

    degree: int
    rank: int
    ranks: int
    heads: int
    kv_heads: int
    copies: int
    pieces: tuple[tuple[int, Span], ...]

    @property
    def inner(self) -> range:
        """The ranks of the group that exchange heads with this one: neighbours, so that they share a node."""
        first = self.rank - self.rank % self.degree
        return range(first, first + self.degree)

    @property
    def outer(self) -> range:
        """The ranks of the group that run a plan with this one: those that compute the same heads."""
        return range(self.rank % self.degree, self.ranks, self.degree)

    @property
    def returned(self) -> tuple[Span, ...]:
        """`pieces` the other way round: rows of the gathered tokens in the order of the ranks."""
        edges = accumulate((len(rows) for _, rows in self.pieces), initial=0)
        placed = [
            (rank, rows.lo, Span(at, at + len(rows))) for (rank, rows), at in zip(self.pieces, edges, strict=False)
        ]
        return tuple(rows for _, _, rows in sorted(placed))

    def shaped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stand-ins with the device, dtype and shape of what the plan will get; they are views of one token."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (
            x[:, :1, :1].expand(x.shape[0], x.shape[1] * self.degree, count, x.shape[3])
            for x, count in zip((q, k, v), counts, strict=True)
        )
        return q, k, v


def split(degree: int, rank: int, ranks: int, layout: str, q: torch.Tensor, k: torch.Tensor) -> Split:
    """The split of one call.

    Args:
        degree: ranks that exchange heads with each other.
        rank, ranks: this rank in the group, and the group's size.
        layout: the tokens a rank holds.
        q, k: (batch, local_seq, heads, head_dim) and (batch, local_seq, kv_heads, head_dim).

    Raises:
        UnsupportedError: ranks, heads or tokens cannot be split that way.
    """
    check_degree(degree, ranks, q.shape[2])
    heads, group = q.shape[2] // degree, q.shape[2] // k.shape[2]
    # Query heads in blocks of this many belong to one rank and to one kv head; a block gets its own copy of that.
    block = gcd(heads, group)
    pieces = _pieces(degree, rank // degree, ranks, layout, q.shape[1])
    return Split(degree, rank, ranks, heads, heads // block, group // block, pieces)


class HeadExchange:
    """The all-to-alls around a plan: one before it and one after, on the caller's stream.

    What travels to a peer is one packet of rows: a token with all its fields side by side, sequence before batch. So
    what has landed is the tokens of all ranks in order, and the plan's inputs are views of it.
    """

    def __init__(self, split: Split, inner: Channel) -> None:
        self.split, self.inner = split, inner

    def before_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) of all tokens of the exchanging ranks, and of this rank's heads."""
        q, k, v = self._gather_tokens("forward", (q, self._copied(k), self._copied(v)))
        return q, k, v

    def after_forward(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of this rank's tokens and all heads."""
        out, lse = self._gather_heads("forward", (out, lse.transpose(1, 2).unsqueeze(3)))
        return out, lse.squeeze(3).transpose(1, 2)

    def before_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same six, of all tokens of the exchanging ranks, and of this rank's heads."""
        fields = (dout, q, self._copied(k), self._copied(v), out, lse.transpose(1, 2).unsqueeze(3))
        dout, q, k, v, out, lse = self._gather_tokens("backward", fields)
        return dout, q, k, v, out, lse.squeeze(3).transpose(1, 2).contiguous()

    def after_backward(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of this rank's tokens and all heads; copies of a kv head are summed in the order of ranks."""
        dq, dk, dv = self._gather_heads("backward", (dq, dk, dv))
        copies = self.split.copies
        if copies > 1:  # PyTorch adds half precision in float32
            dk, dv = dk.unflatten(2, (-1, copies)).sum(3), dv.unflatten(2, (-1, copies)).sum(3)
        return dq, dk, dv

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.split.copies == 1 else x.repeat_interleave(self.split.copies, 2)

    def _gather_tokens(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From (batch, local_seq, degree * heads, width) to (batch, degree * local_seq, heads, width), as views."""
        parts = [x.unflatten(2, (self.split.degree, -1)) for x in fields]
        batch, rows, degree, _, _ = parts[0].shape
        kinds = [(x.shape[3], x.shape[4], x.dtype) for x in parts]
        packet = torch.empty((degree, rows, batch, _row_bytes(kinds)), dtype=torch.uint8, device=parts[0].device)
        for target, source in zip(_views(packet, kinds), parts, strict=True):
            target.copy_(source.permute(2, 1, 0, 3, 4))
        landed = self._exchange(phase, packet)
        if self.split.pieces:
            whole = torch.cat([landed[rank, rows.lo : rows.hi] for rank, rows in self.split.pieces])
        else:
            whole = landed.flatten(0, 1)
        return tuple(x.transpose(0, 1) for x in _views(whole, kinds))

    def _gather_heads(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From (batch, degree * local_seq, heads, width) to (batch, local_seq, degree * heads, width), contiguous."""
        if self.split.pieces:
            fields = [torch.cat([x[:, rows.lo : rows.hi] for rows in self.split.returned], 1) for x in fields]
        parts = [x.unflatten(1, (self.split.degree, -1)) for x in fields]
        batch, degree, rows, _, _ = parts[0].shape
        kinds = [(x.shape[3], x.shape[4], x.dtype) for x in parts]
        packet = torch.empty((degree, rows, batch, _row_bytes(kinds)), dtype=torch.uint8, device=parts[0].device)
        for target, source in zip(_views(packet, kinds), parts, strict=True):
            target.copy_(source.permute(1, 2, 0, 3, 4))
        landed = self._exchange(phase, packet)
        # Copies, so that no result keeps the packet with all the others alive.
        placed = (x.permute(2, 1, 0, 3, 4).clone(memory_format=torch.contiguous_format) for x in _views(landed, kinds))
        return tuple(x.flatten(2, 3) for x in placed)

    def _exchange(self, phase: str, packet: torch.Tensor) -> torch.Tensor:
        """Part i of the packet goes to rank i, and part i of the result came from it."""
        sent = packet.numel() - packet[0].numel()
        COUNTERS.ulysses_exchanges += 1
        if phase == "forward":
            COUNTERS.ulysses_forward_bytes += sent
        else:
            COUNTERS.ulysses_backward_bytes += sent
        landed = torch.empty_like(packet)
        dist.all_to_all_single(landed, packet, group=self.inner.collectives(packet.device))
        return landed


def _pieces(degree: int, outer: int, ranks: int, layout: str, rows: int) -> tuple[tuple[int, Span], ...]:
    """`Split.pieces` of the ranks that make up an outer rank.

    Raises:
        UnsupportedError: together they do not hold what that rank of the plan must.
    """
    fine, coarse = by_name(layout, ranks * rows, ranks), by_name(layout, ranks * rows, ranks // degree)
    found = []
    for rank in range(degree):
        chunks = fine.of(outer * degree + rank)
        for chunk, at in fine.offsets(chunks).items():
            found.append((fine.chunks[chunk], rank, Span(at, at + len(fine.chunks[chunk]))))
    found.sort()
    if _joined([span for span, _, _ in found]) != _joined(list(coarse.spans(outer))):
        raise UnsupportedError(
            f"ulysses_degree={degree} in layout {layout!r}",
            "neighbouring ranks do not hold tokens that one rank of the plan could",
            "layout 'contiguous' or 'zigzag'",
        )
    if [(rank, rows) for _, rank, rows in found] == [(rank, Span(0, rows)) for rank in range(degree)]:
        return ()
    return tuple((rank, rows) for _, rank, rows in found)


def _joined(spans: list[Span]) -> list[Span]:
    """Ascending spans with neighbours that touch made one."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].hi == span.lo:
            joined[-1] = Span(joined[-1].lo, span.hi)
        else:
            joined.append(span)
    return joined


def _field_bytes(kind: Kind) -> int:
    """What a field takes of a row, aligned."""
    heads, width, dtype = kind
    return -(-heads * width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _row_bytes(kinds: Sequence[Kind]) -> int:
    return sum(_field_bytes(kind) for kind in kinds)


def _views(packet: torch.Tensor, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """The fields of a packet (..., row) of bytes, each (..., heads, width)."""
    views, at = [], 0
    for kind in kinds:
        heads, width, dtype = kind
        field = packet[..., at : at + heads * width * dtype.itemsize].view(dtype)
        views.append(field.unflatten(-1, (heads, width)))
        at += _field_bytes(kind)
    return views
