"""Rows that change ranks around an attention of a fixed order, so that every chunk of a document lies on one rank.

    a caller's tensors    rank 0: tokens 0 to 9      rank 1: tokens 10 to 19     chunks of 8 tokens
    all-to-all            rank 0: tokens 0 to 7      rank 1: tokens 8 to 19      8 and 9 move
    attention
    all-to-all            results go back

Where ranks end at chunks nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.plan.schedules.invariant import same_rows
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.execute.memory import Fields
from dfa_megatron.runtime.execute.moves import Moves, moves_between
from dfa_megatron.runtime.request import Request

RunPhase = Callable[[Fields], Fields]
"""A phase of an attention: tensors in, tensors out."""


@dataclass(frozen=True, slots=True)
class ChunkMoves:
    """The moves of one rank.

    q: of queries and what belongs to them. kv: of keys and values. over: the channel; None for one rank.
    """

    q: Moves
    kv: Moves
    over: Channel | None

    def around(self, run: RunPhase, inputs: Fields) -> Fields:
        """Return what `run` of (q, k, v), or of (dout, q, k, v, out or -delta, lse), does with the caller's rows."""
        keys = slice(1, 3) if len(inputs) == 3 else slice(2, 4)
        moves = [self.q] * len(inputs)
        moves[keys] = [self.kv, self.kv]
        first, *others = run(tuple(map(self._moved, moves, inputs)))
        back = self.q.back() if len(inputs) == 3 else self.kv.back()  # of lse, or of dk and dv
        return self._moved(self.q.back(), first), *(self._moved(back, x) for x in others)

    def _moved(self, moves: Moves, x: torch.Tensor) -> torch.Tensor:
        dim = 1 if x.dim() == 4 else 2
        return moves.run(x.movedim(dim, 0), over=self.over).movedim(0, dim).contiguous()


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

    of_q = moves("q")
    return ChunkMoves(of_q, of_q if held.queries is None else moves("kv"), over)
