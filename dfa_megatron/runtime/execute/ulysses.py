"""The all-to-alls of Ulysses around a plan: neighbouring ranks exchange heads for tokens before and after it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dfa_megatron.kernels.tape import call_recorded
from dfa_megatron.plan.language.shape import HeadSplit, TokenSplit
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.execute.wire_format import Fields

_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read q, k and v where they landed."""


def stand_ins(
    heads: HeadSplit, rows: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors with the device, dtype and shape of the plan's q, k and v; they are views of one number.

    rows: the tokens of the plan's rank.
    """
    q, k, v = (
        x.new_empty(()).expand(x.shape[0], rows, count, x.shape[3])
        for x, count in ((q, heads.heads), (k, heads.kv_heads), (v, heads.kv_heads))
    )
    return q, k, v


class HeadExchange:
    """One all-to-all before a plan and one after, on the caller's stream.

    Before a plan, the message to each rank is a block of rows: a token with all its fields side by side, sequence
    before batch. So the receive buffer has the tokens of all ranks in order, and needs no copy. After a plan, a message
    is each field as a whole.

    Where ranks hold numbers of tokens that differ, each sends as many rows as the largest, the last ones empty.

    A rank at an end of the exchange group copies what is for itself while messages travel. One between sends that to
    itself, because the parts that it sends would not lie together otherwise.
    """

    def __init__(self, heads: HeadSplit, tokens: TokenSplit, channel: Channel) -> None:
        self.heads, self.tokens, self.channel = heads, tokens, channel
        rank, last = channel.rank, heads.degree - 1
        self._copied = (rank,) if rank in (0, last) else ()
        self._sent = slice(int(rank == 0), heads.degree - int(rank == last))
        self._counts = [int(other not in self._copied) for other in range(heads.degree)]
        self._work: dist.Work | None = None

    @property
    def keeps(self) -> bool:
        """Whether the results of `before_forward` can be saved for the backward in place of its arguments."""
        return self.heads.keeps

    def before_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Fields:
        """Return (q, k, v) of all tokens of the exchange group and of this rank's heads."""
        return self._gather_tokens("forward", (q, self._repeated(k), self._repeated(v)))

    def after_forward(self, out: torch.Tensor, lse: torch.Tensor) -> Fields:
        """Return (out, lse) of this rank's tokens and all heads."""
        return self._gather_heads("forward", (out, lse))

    def before_backward(self, dout: torch.Tensor, qkv: Fields, read: torch.Tensor, lse: torch.Tensor) -> Fields:
        """Return dout, q, k, v, delta or out, lse, of all tokens of the exchange group and of this rank's heads.

        Args:
            dout: of this rank's tokens.
            qkv: the same; or none, which are results of `before_forward` then.
            read: delta or out, whichever the kernel's backward reads.
            lse: as dout.
        """
        is_delta = read.dim() == 3
        fields = [_wide(read, lse), dout] if is_delta else [_wide(lse), dout, read]
        if qkv:
            fields += [qkv[0], self._repeated(qkv[1]), self._repeated(qkv[2])]
        statistics, dout, *more = self._gather_tokens("backward", fields)
        *delta, lse = _narrow(statistics)
        read = delta[0] if is_delta else more.pop(0)
        return dout, *more, read, lse

    def after_backward(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Fields:
        """Return (dq, dk, dv) of this rank's tokens and all heads; copies of a kv head are summed in rank order."""
        dq, dk, dv = self._gather_heads("backward", (dq, dk, dv))
        copies = self.heads.copies
        if copies > 1:  # PyTorch adds half precision in float32
            dk, dv = dk.unflatten(2, (-1, copies)).sum(3), dv.unflatten(2, (-1, copies)).sum(3)
        return dq, dk, dv

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.heads.copies == 1 else x.repeat_interleave(self.heads.copies, 2)

    def _gather_tokens(self, phase: str, fields: Sequence[torch.Tensor]) -> Fields:
        """Turn (batch, local_seq, degree * heads, width) into (batch, degree * local_seq, heads, width)."""
        parts = [self._filled(x, 1).unflatten(2, (self.heads.degree, -1)).permute(2, 1, 0, 3, 4) for x in fields]
        received = _buffer(parts, 3)
        found = _fields(received, parts)
        self._exchange(phase, parts, received[self._sent], found)
        return tuple(map(self._in_order, found))

    def _in_order(self, received: torch.Tensor) -> torch.Tensor:
        """Turn (degree, local_seq, batch, heads, width) into (batch, degree * local_seq, heads, width)."""
        if self.tokens.gathered:
            ordered = [received[rank, rows.lo : rows.hi].transpose(0, 1) for rank, rows in self.tokens.gathered]
            return torch.cat(ordered, 1).contiguous()
        whole = received.flatten(0, 1).transpose(0, 1)
        # A plan of several ranks reads tokens by block, and some kernels copy a block that is not dense each time.
        return whole.contiguous() if len(self.tokens.plan_group) > 1 else whole

    def _in_rank_order(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rows of a plan's result as the ranks hold them, each as many as the largest."""
        parts: list[list[torch.Tensor]] = [[x.narrow(dim, 0, 0)] for _ in self.tokens.rows]
        for rank, rows in self.tokens.returned:
            parts[rank].append(x.narrow(dim, rows.lo, len(rows)))
        return torch.cat([self._filled(torch.cat(part, dim), dim) for part in parts], dim)

    def _filled(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return x with as many rows as the largest rank has; no copy where they are equally many."""
        lack = max(self.tokens.rows) - x.shape[dim]
        return x if not lack else torch.cat([x, x.new_zeros((*x.shape[:dim], lack, *x.shape[dim + 1 :]))], dim)

    def _gather_heads(self, phase: str, fields: Fields) -> Fields:
        """Turn (batch, degree * local_seq, heads, width) into (batch, local_seq, degree * heads, width), contiguous.

        Statistics have no width, and heads before tokens.
        """
        parts, places, found = [], [], []
        for x in fields:
            tokens, heads = (1, 2) if x.dim() == 4 else (2, 1)
            if self.tokens.gathered:
                x = self._in_rank_order(x, tokens)
            part = x.unflatten(tokens, (self.heads.degree, -1)).movedim(tokens, 0)
            shape = list(part.shape[1:])
            shape.insert(heads, self.heads.degree)
            whole = x.new_empty(shape)
            parts.append(part)
            places.append(whole.movedim(heads, 0))
            found.append(whole.flatten(heads, heads + 1).narrow(tokens, 0, self.tokens.rows[self.channel.rank]))
        received = _buffer([x[self._sent] for x in parts], 1)
        self._exchange(phase, parts, received, places)
        for place, x in zip(places, _fields(received, parts), strict=True):
            place[self._sent].copy_(x)
        return tuple(found)

    def _exchange(
        self, phase: str, parts: Sequence[torch.Tensor], received: torch.Tensor, places: Sequence[torch.Tensor]
    ) -> None:
        """Send part i of each field to rank i.

        Args:
            phase: forward or backward.
            parts: (degree, ...), of each field.
            received: the memory for what other ranks send.
            places: (degree, ...), where the part of each field that stays here goes.
        """
        send = torch.empty_like(received)
        for field, part in zip(_fields(send, parts), parts, strict=True):
            field.copy_(part[self._sent])
        call_recorded(functools.partial(self._post, phase=phase), received, send)
        for rank in self._copied:
            for place, part in zip(places, parts, strict=True):
                place[rank].copy_(part[rank])
        call_recorded(self._land, received, send)

    def _post(self, received: torch.Tensor, send: torch.Tensor, *, phase: str) -> None:
        COUNTERS.ulysses_exchanges += 1
        sent = send.nbytes // len(send) * (self.heads.degree - 1)
        if phase == "forward":
            COUNTERS.ulysses_forward_bytes += sent
        else:
            COUNTERS.ulysses_backward_bytes += sent
        self._work = self.channel.collectives(send.device).all_to_all(received, send, self._counts)

    def _land(self, received: torch.Tensor, _send: torch.Tensor) -> None:
        """Wait for the messages; until then both buffers live."""
        work, self._work = self._work, None
        assert work is not None, "posted before"
        self.channel.finish(work, received.device)


def _wide(*statistics: torch.Tensor) -> torch.Tensor:
    """Return a field (batch, rows, heads, width) of as many statistics (batch, heads, rows)."""
    return torch.stack(statistics, 3).transpose(1, 2)


def _narrow(field: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the statistics of a field, contiguous."""
    return field.permute(3, 0, 2, 1).contiguous().unbind()


def _size(x: torch.Tensor, common: int) -> int:
    """Return the elements of a field without its first `common` dimensions, with what aligns the next field."""
    step = _ALIGNMENT // x.itemsize
    return -(-max(1, math.prod(x.shape[common:])) // step) * step  # none have room too: views of bytes need a stride


def _buffer(fields: Sequence[torch.Tensor], common: int) -> torch.Tensor:
    """Allocate memory for fields whose first `common` dimensions are equal, in the dtype of the first field."""
    row = sum(_size(x, common) * x.itemsize for x in fields)
    return fields[0].new_empty((*fields[0].shape[:common], row // fields[0].itemsize))


def _fields(buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the fields of a buffer (..., row); their shapes in place of its row are those of `like`."""
    common, found, at = buffer.dim() - 1, [], 0
    for x in like:
        shape, size = x.shape[common:], _size(x, common)
        found.append(buffer.view(x.dtype).narrow(common, at // x.itemsize, math.prod(shape)).unflatten(common, shape))
        at += size * x.itemsize
    return found
