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
from dfa_megatron.runtime.execute.moves import Moves, bytes_of, moves_between
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
        keys = (1, 2) if len(inputs) == 3 else (2, 3)
        found = run(self._moved(inputs, keys, self.q, self.kv))
        return self._moved(found, () if len(inputs) == 3 else (1, 2), self.q.back(), self.kv.back())

    def _moved(self, tensors: Fields, keys: tuple[int, ...], q: Moves, kv: Moves) -> Fields:
        """Move rows, those of all tensors in one message, or of queries in one and of keys in another."""
        if self.q is self.kv:
            return _together(tensors, q, self.over)
        others = tuple(at for at in range(len(tensors)) if at not in keys)
        found = dict(zip(others, _together([tensors[at] for at in others], q, self.over), strict=True))
        found |= zip(keys, _together([tensors[at] for at in keys], kv, self.over), strict=True)
        return tuple(found[at] for at in range(len(tensors)))


def _together(tensors: Sequence[torch.Tensor], moves: Moves, over: Channel | None) -> Fields:
    """Move rows of (batch, rows, heads, width) or (batch, heads, rows), a token's bytes side by side."""
    dims = [1 if x.dim() == 4 else 2 for x in tensors]
    by_row = [x.movedim(dim, 0).contiguous() for x, dim in zip(tensors, dims, strict=True)]
    if not by_row:
        return ()
    came = moves.run(torch.cat([bytes_of(x) for x in by_row], 1), over=over)
    widths = [bytes_of(x).shape[1] for x in by_row]
    return tuple(
        part.contiguous().view(x.dtype).view(len(part), *x.shape[1:]).movedim(0, dim).contiguous()
        for part, x, dim in zip(came.split(widths, 1), by_row, dims, strict=True)
    )


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
