"""Heads exchanged for tokens around an attention (Ulysses): all-to-all, attention of every degree-th rank, all-to-all.

    4 ranks, degree 2        rank 0           rank 1           rank 2           rank 3
    a caller's tensors       tokens 0         tokens 1         tokens 2         tokens 3        all heads
    all-to-all               <----- neighbours ----->          <----- neighbours ----->
    one plan of ranks 0, 2   tokens 0, 1                       tokens 2, 3                      the first half of heads
    another of ranks 1, 3                     tokens 0, 1                       tokens 2, 3     the second half
    all-to-all               tokens 0         tokens 1         tokens 2         tokens 3        all heads

Neither a plan nor what runs it knows of the exchange. All ranks of the group compare a call before its first message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.leaf import without_autocast, without_functions
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.degree import HeadSplit, split_heads
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import LAYOUTS as BY_LENGTH
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.runtime import run
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.memory import Fields
from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_gradient
from dfa_megatron.runtime.prepare import Prepared, built, open_transport
from dfa_megatron.runtime.request import Inputs, Request
from dfa_megatron.runtime.run import InputGradients, SavedTensors

_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read q, k and v where they landed."""


def rows_in_order(layout: Layout, neighbours: range) -> tuple[Span, ...]:
    """Return where the tokens of a rank of the plan lie in the rows that neighbours send, of each the largest number.

    Nothing where they lie in order. The layout of the plan is `layout.merged(len(neighbours))`.
    """
    most, first = max(layout.tokens(rank) for rank in neighbours), neighbours[0]
    at = {chunk: (r - first) * most + row for r in neighbours for chunk, row in layout.rows(r).items()}
    found: list[Span] = []
    for chunk in layout.merged(len(neighbours)).of(first // len(neighbours)):
        lo = hi = at[chunk]
        if found and found[-1].hi == lo:
            lo = found.pop().lo
        found.append(Span(lo, hi + len(layout.chunks[chunk])))
    return tuple(found) if found != [Span(0, most * len(neighbours))] else ()


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The all-to-alls around one attention, on the caller's stream.

    A message before a plan is a block of rows: a token with all its fields side by side, sequence before batch. A
    message after a plan is each field as a whole. Every rank sends as many rows as the largest has.

    near: the neighbours, this rank among them. rows, most: tokens of this rank, and of the largest neighbour.
    order: where the plan's tokens lie in the rows that come; nothing where they lie in order.
    inner: the attention of the plan's ranks; neither counted nor compared by itself.
    channel: of the neighbours, once they are connected.
    """

    heads: HeadSplit
    near: range
    rows: int
    most: int
    order: tuple[Span, ...]
    inner: Prepared
    channel: Channel | None = None

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Return k or v with a kv head for each place."""
        return x if self.heads.copies == 1 else x.repeat_interleave(self.heads.copies, 2)

    def to_heads(self, phase: str, fields: Sequence[torch.Tensor]) -> Fields:
        """Turn (batch, rows, degree * heads, width) of this rank's tokens into all tokens of this rank's heads."""
        if lack := self.most - self.rows:
            fields = [torch.cat([x, x.new_zeros((x.shape[0], lack, *x.shape[2:]))], 1) for x in fields]
        parts = [x.unflatten(2, (self.heads.degree, -1)).permute(2, 1, 0, 3, 4) for x in fields]
        came = [x.flatten(0, 1) for x in self._exchange(phase, parts, 2)]
        if self.order:
            came = [torch.cat([x[rows.lo : rows.hi] for rows in self.order]) for x in came]
        # A plan of several ranks reads tokens by block, and some kernels copy a block that is not dense each time.
        dense = self.inner.channel is not None
        return tuple(x.transpose(0, 1).contiguous() if dense else x.transpose(0, 1) for x in came)

    def to_tokens(self, phase: str, fields: Fields) -> Fields:
        """Turn (batch, tokens, heads, width) of this rank's heads into this rank's rows of all heads.

        A statistic is (batch, heads, tokens).
        """
        parts, found = list[torch.Tensor](), list[torch.Tensor]()
        for x in fields:
            tokens = 1 if x.dim() == 4 else 2
            parts.append(self._as_sent(x, tokens).unflatten(tokens, (self.heads.degree, self.most)).movedim(tokens, 0))
        for x in self._exchange(phase, parts, 1):
            tokens, heads = (1, 2) if x.dim() == 5 else (3, 1)
            whole = x.movedim(0, heads).narrow(tokens, 0, self.rows)
            # In memory of its own: a view would hold the whole message.
            found.append(whole.clone(memory_format=torch.contiguous_format).flatten(heads, heads + 1))
        return tuple(found)

    def _as_sent(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the plan's tokens as neighbours hold them, each as many as the largest."""
        if not self.order:
            return x
        edges, last = accumulate(map(len, self.order), initial=0), self.most * self.heads.degree
        held = sorted(zip(self.order, edges, strict=False))
        parts, end = list[torch.Tensor](), 0
        for rows, at in [*held, (Span(last, last), 0)]:
            shape = (*x.shape[:dim], rows.lo - end, *x.shape[dim + 1 :])
            parts += [x.new_zeros(shape), x.narrow(dim, at, len(rows))]
            end = rows.hi
        return torch.cat(parts, dim)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of k or v: the sum over copies, which PyTorch adds in float32."""
        return x if self.heads.copies == 1 else x.unflatten(2, (-1, self.heads.copies)).sum(3)

    def _exchange(self, phase: str, parts: Sequence[torch.Tensor], common: int) -> list[torch.Tensor]:
        """Send part i of each field (degree, ...) to neighbour i, in one message; return what they sent.

        common: the first dimensions, in which fields are alike; behind them they lie side by side.
        """
        assert self.channel is not None, "connected when it was prepared"
        sizes = [_bytes(x, common) for x in parts]
        send = parts[0].new_empty((*parts[0].shape[:common], sum(sizes)), dtype=torch.uint8)
        received = torch.empty_like(send)
        for field, part in zip(_fields(send, parts, sizes), parts, strict=True):
            field.copy_(part)
        sent = send.nbytes // self.heads.degree * (self.heads.degree - 1)
        COUNTERS.ulysses_exchanges += 1
        if phase == "forward":
            COUNTERS.ulysses_forward_bytes += sent
        else:
            COUNTERS.ulysses_backward_bytes += sent
        work = self.channel.collectives(send.device).all_to_all(received, send, [1] * self.heads.degree)
        self.channel.finish(work, send.device)
        return _fields(received, parts, sizes)


def _bytes(x: torch.Tensor, common: int) -> int:
    """Return the bytes of a field without its first `common` dimensions, with what aligns the next field."""
    row = max(1, math.prod(x.shape[common:])) * x.itemsize  # none have room too: views of bytes need a stride
    return -(-row // _ALIGNMENT) * _ALIGNMENT


def _fields(buffer: torch.Tensor, like: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the fields of a buffer of bytes (..., row), shaped as those of `like`."""
    common, found, at = buffer.dim() - 1, list[torch.Tensor](), 0
    for x, size in zip(like, sizes, strict=True):
        shape = x.shape[common:]
        rows = buffer.view(x.dtype).narrow(common, at // x.itemsize, math.prod(shape))
        found.append(rows.unflatten(common, shape))
        at += size
    return found


def made(degree: int, request: Request, over: Channel | None, inputs: Inputs) -> Prepared:
    """Build a settled request without asking the other ranks, for that many neighbours.

    Raises:
        UnsupportedError: neighbours cannot exchange heads here, or nothing serves the request.
    """
    rank, size = (over.rank, over.size) if over is not None else (0, 1)
    what = f"ulysses_degree={degree}"
    if request.plan is not None:
        why, instead = "a plan is one of all ranks of the group", "ulysses_degree=1, or mask="
        raise UnsupportedError(f"{what} with a plan", why, instead)
    heads, held = split_heads(degree, size, inputs.q.shape[2], inputs.k.shape[2]), request.layout
    if request.invariant and heads.copies > 1:
        why = "the sum over the query heads of a kv head would be cut"
        raise UnsupportedError(f"{what} with numerics='invariant'", why, f"at most {inputs.k.shape[2]}, or 1")
    if isinstance(held, Layout) and held.queries is not None:
        why = "an exchange brings one sequence together"
        raise UnsupportedError(f"{what} for two sequences", why, "ulysses_degree=1")
    if isinstance(held, str):
        held = layout_of(held, request.mask_over(size * inputs.q.shape[1]), size)
    merged, near = held.merged(degree), range(rank - rank % degree, rank - rank % degree + degree)
    asks = request if request.layout in BY_LENGTH else replace(request, layout=merged)
    tokens, counts = merged.tokens(rank // degree), (heads.heads, heads.kv_heads, heads.kv_heads)
    like = [  # the plan's tensors: views of one number
        x.new_empty(()).expand(x.shape[0], tokens, count, x.shape[3])
        for x, count in zip(inputs[:3], counts, strict=True)
    ]
    inner = built(asks, size // degree, rank // degree, Inputs(*like), over)
    most = max(held.tokens(each) for each in near)
    exchange = HeadExchange(heads, near, held.tokens(rank), most, rows_in_order(held, near), inner)
    return replace(inner, request=request, exchange=exchange, connect=_connect)


def _connect(prepared: Prepared, over: Channel, device: torch.device) -> Prepared:
    """Connect the neighbours, and the ranks of the plan."""
    exchange = prepared.exchange
    assert exchange is not None, "else nothing sets this"
    channel, degree = over.subgroup(exchange.near), exchange.heads.degree
    channel.collectives(device)
    inner = exchange.inner
    if over.size > degree:
        inner = open_transport(inner, over.subgroup(range(over.rank % degree, over.size, degree)), device)
    return replace(prepared, channel=inner.channel, exchange=replace(exchange, inner=inner, channel=channel))


def run_forward(prepared: Prepared, inputs: Inputs, *, trains: bool = True) -> Fields:
    """Do what `run.run_forward` does, around which neighbours exchange heads.

    q, k and v as they are after the exchange may follow: a backward that gets them exchanges less.
    """
    exchange, (q, k, v, sinks) = prepared.exchange, inputs
    assert exchange is not None, "others are run by `runtime.run`"
    with prepared.running[0 if trains else 2], without_autocast(), without_functions():
        qkv = exchange.to_heads("forward", (q, exchange.copied(k), exchange.copied(v)))
        out, lse = exchange.to_tokens("forward", run.run_forward(exchange.inner, Inputs(*qkv), trains=trains))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    found = out.contiguous(), lse.contiguous()
    if prepared.whole is not None:
        prepared.whole.spoiled(*found)
    return *found, *(qkv if exchange.heads.copies == 1 else ())


def run_backward(prepared: Prepared, dout: torch.Tensor, saved: SavedTensors) -> InputGradients:
    """Do what `run.run_backward` does. q, k and v may be those that `run_forward` returned after its exchange."""
    exchange, (q, k, v, out, lse, sinks) = prepared.exchange, saved
    assert exchange is not None, "others are run by `runtime.run`"
    assert q is not None and k is not None and v is not None and out is not None and lse is not None  # noqa: PT018
    with prepared.running[1], without_autocast(), without_functions():
        is_delta = prepared.kernel.backward_needs == "delta"
        needed = _wide(minus_delta(dout, out)) if is_delta else out
        given = () if q.shape[2] < dout.shape[2] else (q, exchange.copied(k), exchange.copied(v))
        dheads, needed, wide, *qkv = exchange.to_heads("backward", (dout, needed, _wide(lse), *given))
        q, k, v = qkv or (q, k, v)
        inner = (q, k, v, _narrow(needed) if is_delta else needed, _narrow(wide), None)
        gradients = exchange.to_tokens("backward", run.run_backward(exchange.inner, dheads, inner)[:3])
        dq, dk, dv = gradients[0], *map(exchange.summed, gradients[1:])
    if prepared.whole is not None:
        prepared.whole.end_of_backward()
    dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks, prepared.sums)
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    if prepared.whole is not None:
        prepared.whole.spoiled(dq, dk, dv)
    return dq, dk, dv, dsinks


def _wide(statistic: torch.Tensor) -> torch.Tensor:
    """Return a statistic (batch, heads, rows) as a field (batch, rows, heads, 1)."""
    return statistic.transpose(1, 2).unsqueeze(3)


def _narrow(field: torch.Tensor) -> torch.Tensor:
    """Return the statistic of a field, contiguous."""
    return field.squeeze(3).transpose(1, 2).contiguous()
