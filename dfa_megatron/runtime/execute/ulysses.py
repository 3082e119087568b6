"""The all-to-alls of Ulysses around a plan: neighbouring ranks exchange heads for tokens before and after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.plan.language.heads import HeadSplit, TokenSplit
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS

_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read q, k and v where they landed."""

FieldKind = tuple[int, int, torch.dtype]
"""(heads, width, dtype) of a field of a row."""


def stand_ins(
    heads: HeadSplit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors with the device, dtype and shape of the plan's q, k and v; they are views of one token."""
    q, k, v = (
        x[:, :1, :1].expand(x.shape[0], x.shape[1] * heads.degree, count, x.shape[3])
        for x, count in ((q, heads.heads), (k, heads.kv_heads), (v, heads.kv_heads))
    )
    return q, k, v


class HeadExchange:
    """One all-to-all before a plan and one after, on the caller's stream.

    The message to each rank is a block of rows: a token with all its fields side by side, sequence before batch. So the
    receive buffer has the tokens of all ranks in order, and needs no copy.
    """

    def __init__(self, heads: HeadSplit, tokens: TokenSplit, channel: Channel) -> None:
        self.heads, self.tokens, self.channel = heads, tokens, channel

    def before_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (q, k, v) of all tokens of the exchange group and of this rank's heads."""
        q, k, v = self._gather_tokens("forward", (q, self._copied(k), self._copied(v)))
        return q, k, v

    def after_forward(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of this rank's tokens and all heads."""
        out, lse = self._gather_heads("forward", (out, _wide(lse)))
        return out, _narrow(lse)

    @property
    def keeps(self) -> bool:
        """Whether the results of `before_forward` can be saved for the backward in place of its arguments."""
        return self.heads.keeps

    def before_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        delta_or_out: torch.Tensor,
        lse: torch.Tensor,
        *,
        saved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the same six tensors, of all tokens of the exchange group and of this rank's heads.

        Args:
            delta_or_out: whichever the kernel's backward needs.
            saved: q, k and v are results of `before_forward`, and stay as they are.
        """
        is_delta = delta_or_out.dim() == 3
        fields = [dout, _wide(delta_or_out) if is_delta else delta_or_out, _wide(lse)]
        if not saved:
            fields += (q, self._copied(k), self._copied(v))
        dout, delta_or_out, lse, *qkv = self._gather_tokens("backward", fields)
        q, k, v = qkv or (q, k, v)
        return dout, q, k, v, _narrow(delta_or_out) if is_delta else delta_or_out, _narrow(lse)

    def after_backward(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of this rank's tokens and all heads; copies of a kv head are summed in rank order."""
        dq, dk, dv = self._gather_heads("backward", (dq, dk, dv))
        copies = self.heads.copies
        if copies > 1:  # PyTorch adds half precision in float32
            dk, dv = dk.unflatten(2, (-1, copies)).sum(3), dv.unflatten(2, (-1, copies)).sum(3)
        return dq, dk, dv

    def own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return the entries of x (heads,) for the query heads that this rank computes."""
        own: torch.Tensor = x.unflatten(0, (self.heads.degree, -1))[self.channel.rank]
        return own

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.heads.copies == 1 else x.repeat_interleave(self.heads.copies, 2)

    def _gather_tokens(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Turn (batch, local_seq, degree * heads, width) into (batch, degree * local_seq, heads, width)."""
        split = [x.unflatten(2, (self.heads.degree, -1)) for x in fields]
        batch, rows, degree, _, _ = split[0].shape
        kinds = [(x.shape[3], x.shape[4], x.dtype) for x in split]
        send = torch.empty((degree, rows, batch, _row_bytes(kinds)), dtype=torch.uint8, device=split[0].device)
        for target, source in zip(_views(send, kinds), split, strict=True):
            target.copy_(source.permute(2, 1, 0, 3, 4))
        return tuple(self._in_order(x) for x in _views(self._exchange(phase, send), kinds))

    def _in_order(self, received: torch.Tensor) -> torch.Tensor:
        """Turn (degree, local_seq, batch, heads, width) into (batch, degree * local_seq, heads, width)."""
        if self.tokens.gathered:
            ordered = [received[rank, rows.lo : rows.hi].transpose(0, 1) for rank, rows in self.tokens.gathered]
            return torch.cat(ordered, 1).contiguous()
        whole = received.flatten(0, 1).transpose(0, 1)
        # A plan of several ranks reads tokens by block, and some kernels copy a block that is not dense each time.
        return whole.contiguous() if len(self.tokens.plan_group) > 1 else whole

    def _gather_heads(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Turn (batch, degree * local_seq, heads, width) into (batch, local_seq, degree * heads, width), contiguous."""
        if self.tokens.gathered:
            fields = [torch.cat([x[:, rows.lo : rows.hi] for rows in self.tokens.returned], 1) for x in fields]
        split = [x.unflatten(1, (self.heads.degree, -1)) for x in fields]
        batch, degree, rows, _, _ = split[0].shape
        kinds = [(x.shape[3], x.shape[4], x.dtype) for x in split]
        send = torch.empty((degree, rows, batch, _row_bytes(kinds)), dtype=torch.uint8, device=split[0].device)
        for target, source in zip(_views(send, kinds), split, strict=True):
            target.copy_(source.permute(1, 2, 0, 3, 4))
        received = self._exchange(phase, send)
        # Copies, so that no result keeps the whole receive buffer alive.
        placed = (x.permute(2, 1, 0, 3, 4) for x in _views(received, kinds))
        return tuple(x.clone(memory_format=torch.contiguous_format).flatten(2, 3) for x in placed)

    def _exchange(self, phase: str, send: torch.Tensor) -> torch.Tensor:
        """Send row i of `send` to rank i, and return the rows of all ranks."""
        sent = send.numel() - send[0].numel()
        COUNTERS.ulysses_exchanges += 1
        if phase == "forward":
            COUNTERS.ulysses_forward_bytes += sent
        else:
            COUNTERS.ulysses_backward_bytes += sent
        received = torch.empty_like(send)
        work = self.channel.collectives(send.device).all_to_all(received, send)
        if send.is_cuda:
            work.wait()  # the current stream waits, not the host
        else:
            self.channel.wait(work.wait)
        return received


def _wide(statistic: torch.Tensor) -> torch.Tensor:
    """Turn (batch, heads, rows) into a field (batch, rows, heads, 1)."""
    return statistic.transpose(1, 2).unsqueeze(3)


def _narrow(field: torch.Tensor) -> torch.Tensor:
    """Turn a field (batch, rows, heads, 1) into (batch, heads, rows), contiguous."""
    return field.squeeze(3).transpose(1, 2).contiguous()


def _field_bytes(kind: FieldKind) -> int:
    """Return the bytes of a field in a row, aligned."""
    heads, width, dtype = kind
    return -(-heads * width * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _row_bytes(kinds: Sequence[FieldKind]) -> int:
    return sum(_field_bytes(kind) for kind in kinds)


def _views(buffer: torch.Tensor, kinds: Sequence[FieldKind]) -> list[torch.Tensor]:
    """Return the fields of a buffer (..., row) of bytes, each (..., heads, width)."""
    views, at = [], 0
    for kind in kinds:
        heads, width, dtype = kind
        field = buffer[..., at : at + heads * width * dtype.itemsize].view(dtype)
        views.append(field.unflatten(-1, (heads, width)))
        at += _field_bytes(kind)
    return views
