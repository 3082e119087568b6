"""The whole sequence as one rank meets it: what its tokens see, who holds them, and how their rows move.

A batch is one sequence, a row behind another, each with documents of its own. Keys go to every rank in one message:
a query chooses few, but the queries of a rank together choose nearly all. Rows of queries go from ranks with much
to score to ranks with little:

    contiguous, causal, 4 ranks     rank 0     rank 1     rank 2     rank 3
    work of own rows, of 16         1          3          5          7
    rows that it scores             own        own        most       half
    and of others                   3 of 16    1 of 16               -
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.triton.support import interpreted, triton_refusal
from dfa_megatron.plan.language.geometry import Span, joined_spans
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask, causal, components
from dfa_megatron.plan.schedules.load_balanced import dealt
from dfa_megatron.rows import join_rows
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared, compared
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, check_rows, mask_of, offsets_of, rows_of
from dfa_megatron.runtime.execute.moves import Moves, moves_between
from dfa_megatron.runtime.request import Request

MEMORY = 1 << 26
"""Bytes of the largest intermediate tensor of a block."""

ROWS = 64
"""Rows of the largest block of scores."""

_PIECES = 128
"""Into so many pieces of rows the share of a rank is cut, which decides how even the work is."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A batch over the ranks of a group.

    over: the channel of the group; None for one rank. layout: of all rows of the batch, as one sequence.
    seen: which of its tokens see which. batch, length: the rows, and the tokens of a row.
    """

    over: Channel | None
    layout: Layout
    seen: Mask
    batch: int
    length: int

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        over: Channel | None,
        layout: str | Layout,
        cu_seqlens: CuSeqlens = None,
        mask: Mask | Sequence[Mask] | None = None,
    ) -> Whole:
        """Return the whole of x (batch, local_seq, ...); without cu_seqlens and mask a row is one causal document.

        Raises:
            UnsupportedError: the rank holds other tokens than layout, documents or mask give it.
        """
        (rank, ranks), (batch, tokens) = (0, 1) if over is None else (over.rank, over.size), x.shape[:2]
        if mask is not None and cu_seqlens is not None:
            raise UnsupportedError("cu_seqlens and mask", "each says which tokens see which", "one of them alone")
        rows: Sequence[Any] = rows_of(cu_seqlens, x) if mask is None or isinstance(mask, Mask) else tuple(mask)
        if not rows:
            every = layout.length if isinstance(layout, Layout) else ranks * tokens
            one = mask if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
            rows = (one or causal(every),) * batch
        check_rows(rows, x)
        joined, held = join_rows(tuple(rows), layout, ranks)
        if held.queries is not None or held.ranks != ranks:
            what = f"{held.ranks} ranks" if held.queries is None else "queries and keys of two sequences"
            raise UnsupportedError(what, f"{ranks} ranks share one sequence", "a layout and a mask of it")
        held.check_tokens(rank, batch * tokens)
        if not isinstance(joined, Mask):
            joined = mask_of(joined, held.length, causal=True, window_size=(-1, -1))
        return cls(over, held, joined, batch, held.length // batch)

    @property
    def rank(self) -> int:
        """Return this process's rank in the group."""
        return 0 if self.over is None else self.over.rank

    def keys(self, device: torch.device) -> Moves:
        """Return the moves that bring the rows of all ranks to every rank, in order; back, they sum gradients."""
        return _moves(self.layout, ((Span(0, self.layout.length),),) * self.layout.ranks, self.rank, device)

    def rows(self, device: torch.device) -> Moves:
        """Return the moves that bring rows to the ranks that score them."""
        return _moves(self.layout, scored_by(self.seen, self.layout), self.rank, device)

    def scored(self) -> tuple[Span, ...]:
        """Return the rows that this rank scores."""
        return scored_by(self.seen, self.layout)[self.rank]

    def exchange(self, what: str, facts: dict[str, str], device: torch.device) -> Compared:
        """Return an exchange over the ranks, which compare it. Collective.

        Raises:
            DisagreementError: the ranks ask for different ones; the message is a table.
        """
        about = f"mask {self.seen.name}", f"layout {self.layout}"
        told = facts | {"batch": str(self.batch), "tokens of a rank": f"{self.layout.length} in all"}
        return compared(what, self.over, told, device, *about)

    def joined(self, positions: torch.Tensor) -> torch.Tensor:
        """Return positions (batch, rows, topk) of rows as those (batch * rows, topk) of the batch as one sequence."""
        if self.batch == 1:
            return positions[0]  # no copy: they are kept for the backward
        return positions.where(positions < 0, positions + self._first(positions)).flatten(0, 1)

    def by_row(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `joined`."""
        rows = positions.view(self.batch, len(positions) // self.batch, positions.shape[1])
        return rows.where(rows < 0, rows - self._first(rows))

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.batch, device=like.device, dtype=like.dtype)[:, None, None] * self.length


def kernels_for(x: torch.Tensor, *, adds: bool = False) -> Any:
    """Return the module of Triton's kernels where they compute for such a tensor, else None.

    adds: gradients of keys, by atomics: PyTorch adds where deterministic algorithms are asked for.
    """
    if adds and torch.are_deterministic_algorithms_enabled():
        return None
    large = x.dtype == torch.float64 or (x.dtype == torch.float32 and x.shape[-1] > 256)  # for shared memory
    if large or not (x.is_cuda or interpreted()) or triton_refusal() is not None:
        return None
    from dfa_megatron.kernels.triton import sparse

    return sparse


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may keep it for a backward
def _moves(layout: Layout, wanted: tuple[tuple[Span, ...], ...], rank: int, device: torch.device) -> Moves:
    return moves_between([layout.spans(other) for other in range(layout.ranks)], wanted, rank, device)


@lru_cache(maxsize=64)
def scored_by(seen: Mask, layout: Layout) -> tuple[tuple[Span, ...], ...]:
    """Return the rows that every rank scores, so that all score about as many pairs.

    A rank keeps the rows of the fewest pairs; the others, fewer rows for as many pairs, are dealt.
    """
    pieces = [*_pieces(seen, layout)]
    spans, work, owners = [span for span, *_ in pieces], [work for _, work, _ in pieces], [rank for *_, rank in pieces]
    lightest = sorted(range(len(spans)), key=lambda piece: (work[piece] / len(spans[piece]), work[piece], piece))
    found: list[list[Span]] = [[] for _ in range(layout.ranks)]
    for span, rank in zip(spans, dealt(work, owners, layout.ranks, lightest), strict=True):
        found[rank].append(span)
    return tuple(tuple(joined_spans(sorted(mine))) for mine in found)


def _pieces(seen: Mask, layout: Layout) -> Iterable[tuple[Span, int, int]]:
    """Yield (rows of one rank and one component, their pairs, the rank)."""
    owners, step = layout.joined(), max(1, layout.length // (_PIECES * layout.ranks))
    step -= step % ROWS if step > ROWS else 0  # pieces of whole blocks
    starts = sorted({*range(0, layout.length, step), *(chunk.lo for chunk in owners.chunks)})
    for part in components(seen):
        lo, hi = part.span.lo, part.span.hi
        edges = [lo, *starts[bisect_right(starts, lo) : bisect_left(starts, hi)], hi]
        for (top, end), work in zip(pairwise(edges), part.row_work(edges), strict=True):
            yield Span(top, end), work, owners.owner_of(top)


def scale_of(given: float | None, width: int) -> float:
    """Return the scale of scores, `width ** -0.5` for None; refuse what attention refuses."""
    return Request(softmax_scale=width**-0.5 if given is None else given, causal=True).softmax_scale
