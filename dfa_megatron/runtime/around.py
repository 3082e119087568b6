"""What moves around an attention: heads that are exchanged for tokens, and rows of chunks that lie on two ranks.

Heads (Ulysses): all-to-all, attention of every degree-th rank, all-to-all.

    4 ranks, degree 2        rank 0           rank 1           rank 2           rank 3
    a caller's tensors       tokens 0         tokens 1         tokens 2         tokens 3        all heads
    all-to-all               <----- neighbours ----->          <----- neighbours ----->
    one plan of ranks 0, 2   tokens 0, 1                       tokens 2, 3                      the first half of heads
    another of ranks 1, 3                     tokens 0, 1                       tokens 2, 3     the second half
    all-to-all               tokens 0         tokens 1         tokens 2         tokens 3        all heads

Rows, for a fixed order of results: every chunk of a document lies on one rank. Where ranks end at chunks nothing moves.

    a caller's tensors    rank 0: tokens 0 to 9      rank 1: tokens 10 to 19     chunks of 8 tokens
    all-to-all            rank 0: tokens 0 to 7      rank 1: tokens 8 to 19      8 and 9 move
    attention
    all-to-all            results go back

Neither a plan nor what runs it knows of them. All ranks of the group compare a call before its first message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.degree import HeadSplit, split_heads
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import LAYOUTS as BY_LENGTH
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.invariant import same_rows
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.memory import Fields
from dfa_megatron.runtime.execute.moves import Moves, moves_between, packed, unpacked
from dfa_megatron.runtime.prepare import Prepared, built
from dfa_megatron.runtime.request import Inputs, Request

RunPhase = Callable[[Fields], Fields]
"""A phase of an attention: tensors in, tensors out."""


def rows_in_order(layout: Layout, neighbours: range) -> tuple[Span, ...]:
    """Return where the tokens of a rank of the plan lie in the rows that neighbours send, one behind the other.

    Nothing where they lie in order. The layout of the plan is `layout.merged(len(neighbours))`.
    """
    starts = zip(neighbours, accumulate(map(layout.tokens, neighbours), initial=0), strict=False)
    at = {chunk: lo + row for rank, lo in starts for chunk, row in layout.rows(rank).items()}
    found = [Span(0, 0)]
    for chunk in layout.merged(len(neighbours)).of(neighbours[0] // len(neighbours)):
        lo = found.pop().lo if found[-1].hi == at[chunk] else at[chunk]
        found.append(Span(lo, at[chunk] + len(layout.chunks[chunk])))
    return tuple(found) if len(found) > 1 else ()


def _in_order(x: torch.Tensor, rows: tuple[Span, ...]) -> torch.Tensor:
    return torch.cat([x[span.lo : span.hi] for span in rows]) if rows else x


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The all-to-alls around one attention, on the caller's stream.

    A message is a block of rows: a token with all its fields side by side, sequence before batch.

    near: the neighbours, this rank among them. tokens: of each.
    order, back: where the plan's tokens lie in the rows that come, and these in the plan's tokens; nothing where they
        lie in order.
    over: the channel of the group.
    """

    heads: HeadSplit
    near: range
    tokens: list[int]
    order: tuple[Span, ...]
    back: tuple[Span, ...]
    over: Channel

    @property
    def rows(self) -> int:
        """The tokens of this rank."""
        return self.tokens[self.over.rank - self.near[0]]

    def around(self, run: RunPhase, inputs: Fields) -> Fields:
        """Return what `run` of (q, k, v), or of (dout, q, k, v, out or -delta, lse), does, with heads exchanged.

        Behind out and lse may stand q, k and v as they are after the exchange; a backward may get these.
        """
        if len(inputs) == 3:
            q, k, v = inputs
            qkv = self.to_heads("forward", (q, self.copied(k), self.copied(v)))
            found = self.over.spoiled(*self.to_tokens("forward", run(qkv)))
            return *found, *(qkv if self.heads.copies == 1 else ())
        dout, q, k, v, needed, lse = inputs
        is_delta = needed.dim() == 3
        given = () if q.shape[2] < dout.shape[2] else (q, self.copied(k), self.copied(v))
        sent = dout, _wide(needed) if is_delta else needed, _wide(lse), *given
        dheads, needed, wide, *came = self.to_heads("backward", sent)
        q, k, v = came or (q, k, v)
        gradients = run((dheads, q, k, v, _narrow(needed) if is_delta else needed, _narrow(wide)))
        dq, dk, dv = self.to_tokens("backward", gradients)
        return self.over.spoiled(dq, self.summed(dk), self.summed(dv))

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return k or v with a kv head for each place."""
        return x if self.heads.copies == 1 else x.repeat_interleave(self.heads.copies, 2)

    def to_heads(self, phase: str, fields: Sequence[torch.Tensor]) -> Fields:
        """Turn (batch, rows, degree * heads, width) of this rank's tokens into all tokens of this rank's heads."""
        degree = self.heads.degree
        parts = [x.unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4) for x in fields]
        came = self._exchange(phase, parts, 2, [self.rows] * degree, self.tokens)
        found = [_in_order(x, self.order).transpose(0, 1) for x in came]
        # A plan of several ranks reads tokens by block, and some kernels copy a block that is not dense each time.
        return tuple(x.contiguous() for x in found) if self.over.size > degree else tuple(found)

    def to_tokens(self, phase: str, fields: Fields) -> Fields:
        """Turn (batch, tokens, heads, width) of this rank's heads into this rank's rows of all heads.

        A statistic is (batch, heads, tokens).
        """
        degree, found = self.heads.degree, list[torch.Tensor]()
        parts = [_in_order(x.movedim(1 if x.dim() == 4 else 2, 0), self.back) for x in fields]
        for x in self._exchange(phase, parts, 1, self.tokens, [self.rows] * degree):
            whole = x.unflatten(0, (degree, self.rows))
            heads, order = (2, (2, 1, 0, 3, 4)) if whole.dim() == 5 else (1, (2, 0, 3, 1))
            # In memory of its own: a view would hold the whole message.
            own = whole.permute(order).clone(memory_format=torch.contiguous_format)
            found.append(own.flatten(heads, heads + 1))
        return tuple(found)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of k or v: the sum over copies, which PyTorch adds in float32."""
        return x if self.heads.copies == 1 else x.unflatten(2, (-1, self.heads.copies)).sum(3)

    def _exchange(
        self, phase: str, parts: Sequence[torch.Tensor], lead: int, sent: list[int], came: list[int]
    ) -> list[torch.Tensor]:
        """Send rows of each field to the neighbours, so many to each, in one message; return what they sent.

        lead: the first dimensions of a part, which count its rows.
        """
        over, send = self.over, packed(parts, lead)
        received = send.new_empty((sum(came), send.shape[1]))
        nbytes = (sum(sent) - sent[over.rank - self.near[0]]) * send.shape[1]
        COUNTERS.ulysses_exchanges += 1
        if phase == "forward":
            COUNTERS.ulysses_forward_bytes += nbytes
        else:
            COUNTERS.ulysses_backward_bytes += nbytes
        nobody = [0] * self.near[0], [0] * (over.size - self.near[-1] - 1)
        counts = ([*nobody[0], *each, *nobody[1]] for each in (came, sent))
        over.communicator(send.device).all_to_all(received, send, *counts)
        return unpacked(received, parts, lead)


def made(degree: int, request: Request, mask: Mask, held: Layout, over: Channel | None, inputs: Inputs) -> Prepared:
    """Build a request without asking the other ranks, for that many neighbours, or refuse it."""
    rank, size = (over.rank, over.size) if over is not None else (0, 1)
    what = f"ulysses_degree={degree}"
    if request.plan is not None:
        why, instead = "a plan is one of all ranks of the group", "ulysses_degree=1, or mask="
        raise UnsupportedError(f"{what} with a plan", why, instead)
    heads = split_heads(degree, size, inputs.q.shape[2], inputs.k.shape[2])
    assert over is not None, "a degree divides the ranks"
    if request.invariant and heads.copies > 1:
        why = "the sum over the query heads of a kv head would be cut"
        raise UnsupportedError(f"{what} with numerics='invariant'", why, f"at most {inputs.k.shape[2]}, or 1")
    if held.queries is not None:
        why = "an exchange brings one sequence together"
        raise UnsupportedError(f"{what} for two sequences", why, "ulysses_degree=1")
    merged, near = held.merged(degree), range(rank - rank % degree, rank - rank % degree + degree)
    if request.layout in BY_LENGTH:
        inside, within = request, by_name(str(request.layout), held.length, size // degree)
    else:
        inside, within = replace(request, layout=merged), merged
    tokens, counts = merged.tokens(rank // degree), (heads.heads, heads.kv_heads, heads.kv_heads)
    like = [  # the plan's tensors: views of one number
        x.new_empty(()).expand(x.shape[0], tokens, count, x.shape[3])
        for x, count in zip(inputs[:3], counts, strict=True)
    ]
    plan = built(inside, mask, within, rank // degree, Inputs(*like), over, range(rank % degree, size, degree))
    order = rows_in_order(held, near)
    ends = accumulate(map(len, order))
    back = tuple(Span(end - len(rows), end) for rows, end in sorted(zip(order, ends, strict=True)))
    exchange = HeadExchange(heads, near, list(map(held.tokens, near)), order, back, over)
    return replace(plan, request=request, exchange=exchange)


def _wide(statistic: torch.Tensor) -> torch.Tensor:
    """Return a statistic (batch, heads, rows) as a field (batch, rows, heads, 1)."""
    return statistic.transpose(1, 2).unsqueeze(3)


def _narrow(field: torch.Tensor) -> torch.Tensor:
    """Return the statistic of a field, contiguous."""
    return field.squeeze(3).transpose(1, 2).contiguous()


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
        rows = [moves.place_own(x, d) for x, d in zip(tensors, dims, strict=True)]
        sent = [x.index_select(d, moves.before.away).movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        came = unpacked(moves.exchanged(packed(sent), over=self.over), sent)
        placed = [moves.place_others(x, c.movedim(0, d), d) for x, c, d in zip(rows, came, dims, strict=True)]
        return tuple(placed) if self.over is None else self.over.spoiled(*placed)


def rows_to_chunks(
    held: Layout, whole: Layout, rank: int, device: torch.device, over: Channel | None, peers: range
) -> ChunkMoves | None:
    """Return the moves from the rows that ranks hold to those of whole chunks; None where none move.

    peers: the numbers in the group of these ranks.
    """
    if same_rows(held, whole):
        return None
    peers, size = (range(whole.ranks), whole.ranks) if over is None else (peers, over.size)

    def moves(side: str) -> Moves:
        before, after = (
            [layout.spans(peers.index(each), side) if each in peers else () for each in range(size)]
            for layout in (held, whole)
        )
        return moves_between(before, after, peers[rank], device)

    return ChunkMoves(moves("q"), None if held.queries is None else moves("kv"), over)
