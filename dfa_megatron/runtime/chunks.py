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
from dfa_megatron.runtime.execute.moves import Moves, moves_between
from dfa_megatron.runtime.request import Request

RunPhase = Callable[[Fields], Fields]
"""A phase of an attention: tensors in, tensors out."""


@dataclass(frozen=True, slots=True)
class ChunkMoves:
    """The moves of one rank. q: of queries and what belongs to them. kv: of keys and values."""

    q: Moves
    kv: Moves

    def forward(self, run: RunPhase, over: Channel | None, qkv: Fields) -> Fields:
        """Return what `run` of (q, k, v) does, with the caller's rows before and after."""
        return self.back(over, run(self.there(over, qkv[:1], qkv[1:])), ())

    def backward(self, run: RunPhase, over: Channel | None, inputs: Fields) -> Fields:
        """Return what `run` of (dout, q, k, v, out or -delta, lse) does, likewise."""
        dout, q, k, v, needed, lse = inputs
        dout, q, needed, lse, k, v = self.there(over, (dout, q, needed, lse), (k, v))
        dq, *of_keys = run((dout, q, k, v, needed, lse))
        return self.back(over, (dq,), of_keys)

    def there(self, over: Channel | None, of_q: Sequence[torch.Tensor], of_kv: Sequence[torch.Tensor]) -> Fields:
        """Return tensors of a caller's rows with the rows of whole chunks; a statistic is (batch, heads, rows)."""
        return *(_moved(self.q, x, over) for x in of_q), *(_moved(self.kv, x, over) for x in of_kv)

    def back(self, over: Channel | None, of_q: Sequence[torch.Tensor], of_kv: Sequence[torch.Tensor]) -> Fields:
        """Return results of whole chunks with the caller's rows."""
        q, kv = self.q.back(), self.kv.back()
        return *(_moved(q, x, over) for x in of_q), *(_moved(kv, x, over) for x in of_kv)


def _moved(moves: Moves, x: torch.Tensor, over: Channel | None) -> torch.Tensor:
    dim = 1 if x.dim() == 4 else 2
    return moves.run(x.movedim(dim, 0), over=over).movedim(0, dim).contiguous()


def rows_to_chunks(request: Request, plan: AttentionPlan, rank: int, device: torch.device) -> ChunkMoves | None:
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
    return ChunkMoves(of_q, of_q if held.queries is None else moves("kv"))
