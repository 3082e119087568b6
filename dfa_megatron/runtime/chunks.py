"""Rows that change ranks around an attention of a fixed order, so that every chunk of a document lies on one rank.

    a caller's tensors    rank 0: tokens 0 to 9      rank 1: tokens 10 to 19     chunks of 8 tokens
    all-to-all            rank 0: tokens 0 to 7      rank 1: tokens 8 to 19      8 and 9 move
    attention
    all-to-all            results go back

Where ranks end at chunks nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.plan.schedules.invariant import same_rows
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.execute.memory import Fields
from dfa_megatron.runtime.execute.moves import Moves, moves_between, packed, unpacked
from dfa_megatron.runtime.request import Request

RunPhase = Callable[[Fields], Fields]
"""A phase of an attention: tensors in, tensors out."""


@dataclass(frozen=True, slots=True)
class ChunkMoves:
    """The moves of one rank.

    q: of queries and what belongs to them. kv: of keys and values; None where they lie as queries do, and travel with
    them. over: the channel; None for one rank.
    """

    q: Moves
    kv: Moves | None
    over: Channel | None

    def around(self, run: RunPhase, inputs: Fields) -> Fields:
        """Return what `run` of (q, k, v), or of (dout, q, k, v, out or -delta, lse), does with the caller's rows."""
        forward, q, kv = len(inputs) == 3, self.q.back(), None if self.kv is None else self.kv.back()
        found = run(self._moved(inputs, (1, 2) if forward else (2, 3), self.q, self.kv))
        return self._moved(found, () if forward else (1, 2), q, kv)

    def _moved(self, tensors: Fields, keys: tuple[int, ...], q: Moves, kv: Moves | None) -> Fields:
        """Move the rows of all tensors in one message, or of those at `keys` in a second."""
        if kv is None or not keys:
            return self._together(tensors, q)
        found = [*tensors]
        others = [at for at in range(len(tensors)) if at not in keys]
        for places, moves in ((others, q), (keys, kv)):
            for at, x in zip(places, self._together([tensors[at] for at in places], moves), strict=True):
                found[at] = x
        return tuple(found)

    def _together(self, tensors: Sequence[torch.Tensor], moves: Moves) -> Fields:
        """Move rows of (batch, rows, heads, width) or (batch, heads, rows)."""
        dims = [1 if x.dim() == 4 else 2 for x in tensors]
        by_row = [x.movedim(dim, 0) for x, dim in zip(tensors, dims, strict=True)]
        came = unpacked(moves.run(packed(by_row), over=self.over), by_row)
        return tuple(x.movedim(0, dim).contiguous() for x, dim in zip(came, dims, strict=True))


def rows_to_chunks(
    request: Request, plan: AttentionPlan, rank: int, device: torch.device, over: Channel | None
) -> ChunkMoves | None:
    """Return the moves from the rows of a settled request to those of a plan of whole chunks; None where none move."""
    whole, held = plan.forward.layout, request.layout
    if isinstance(held, str):
        held = layout_of(held, plan.forward.mask, whole.ranks)
    if same_rows(held, whole):
        return None

    def moves(side: str) -> Moves:
        before, after = ([layout.spans(each, side) for each in range(whole.ranks)] for layout in (held, whole))
        return moves_between(before, after, rank, device)

    return ChunkMoves(moves("q"), None if held.queries is None else moves("kv"), over)
