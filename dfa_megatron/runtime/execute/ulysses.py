"""The all-to-alls of Ulysses around a plan: neighbours exchange heads for tokens, and the plan runs over the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.plan.language.heads import HeadSplit, TokenSplit
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS

_ALIGNMENT = 16
"""Bytes. Kernels load 16 at a time, and read q, k and v where they landed."""

Kind = tuple[int, int, torch.dtype]
"""(heads, width, dtype) of a field of a packet."""


def stand_ins(
    heads: HeadSplit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors with the device, dtype and shape of what the plan will get; they are views of one token."""
    q, k, v = (
        x[:, :1, :1].expand(x.shape[0], x.shape[1] * heads.degree, count, x.shape[3])
        for x, count in ((q, heads.heads), (k, heads.kv_heads), (v, heads.kv_heads))
    )
    return q, k, v


class HeadExchange:
    """One all-to-all before a plan and one after, on the caller's stream.

    What travels to a peer is one packet of rows: a token with all its fields side by side, sequence before batch. So
    what has landed is the tokens of all ranks in order, and can be read as it lies.
    """

    def __init__(self, heads: HeadSplit, tokens: TokenSplit, inner: Channel) -> None:
        self.heads, self.tokens, self.inner = heads, tokens, inner

    def before_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q, k, v) of all tokens of the exchanging ranks, and of this rank's heads."""
        q, k, v = self._gather_tokens("forward", (q, self._copied(k), self._copied(v)))
        return q, k, v

    def after_forward(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of this rank's tokens and all heads."""
        out, lse = self._gather_heads("forward", (out, _wide(lse)))
        return out, _narrow(lse)

    @property
    def keeps(self) -> bool:
        """What `before_forward` gave can be kept in the place of what it was given."""
        return self.heads.keeps

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor with the device, dtype and shape that q, k or v had before the exchange; a view of one number."""
        batch, tokens, heads, width = x.shape
        degree = self.heads.degree
        return x[:1, :1, :1, :1].expand(batch, tokens // degree, heads * degree, width)

    def before_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        read: torch.Tensor,
        lse: torch.Tensor,
        *,
        kept: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same six, of all tokens of the exchanging ranks, and of this rank's heads.

        Args:
            read: out or delta.
            kept: q, k and v are what `before_forward` gave, and stay.
        """
        delta = read.dim() == 3
        fields = [dout, _wide(read) if delta else read, _wide(lse)]
        if not kept:
            fields += (q, self._copied(k), self._copied(v))
        dout, read, lse, *qkv = self._gather_tokens("backward", fields)
        q, k, v = qkv or (q, k, v)
        return dout, q, k, v, _narrow(read) if delta else read, _narrow(lse)

    def after_backward(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of this rank's tokens and all heads; copies of a kv head are summed in the order of ranks."""
        dq, dk, dv = self._gather_heads("backward", (dq, dk, dv))
        copies = self.heads.copies
        if copies > 1:  # PyTorch adds half precision in float32
            dk, dv = dk.unflatten(2, (-1, copies)).sum(3), dv.unflatten(2, (-1, copies)).sum(3)
        return dq, dk, dv

    def own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Of one number for each query head (heads,), those of the heads that this rank computes."""
        own: torch.Tensor = x.unflatten(0, (self.heads.degree, -1))[self.inner.rank]
        return own

    def _copied(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.heads.copies == 1 else x.repeat_interleave(self.heads.copies, 2)

    def _gather_tokens(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From (batch, local_seq, degree * heads, width) to (batch, degree * local_seq, heads, width)."""
        parts = [x.unflatten(2, (self.heads.degree, -1)) for x in fields]
        batch, rows, degree, _, _ = parts[0].shape
        kinds = [(x.shape[3], x.shape[4], x.dtype) for x in parts]
        packet = torch.empty((degree, rows, batch, _row_bytes(kinds)), dtype=torch.uint8, device=parts[0].device)
        for target, source in zip(_views(packet, kinds), parts, strict=True):
            target.copy_(source.permute(2, 1, 0, 3, 4))
        return tuple(self._in_order(x) for x in _views(self._exchange(phase, packet), kinds))

    def _in_order(self, landed: torch.Tensor) -> torch.Tensor:
        """From (degree, local_seq, batch, heads, width) to (batch, degree * local_seq, heads, width)."""
        if self.tokens.pieces:
            parts = [landed[rank, rows.lo : rows.hi].transpose(0, 1) for rank, rows in self.tokens.pieces]
            return torch.cat(parts, 1).contiguous()
        whole = landed.flatten(0, 1).transpose(0, 1)
        # A plan of several ranks reads it block by block, and some kernels copy what is not dense each time.
        return whole.contiguous() if len(self.tokens.plan_group) > 1 else whole

    def _gather_heads(self, phase: str, fields: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From (batch, degree * local_seq, heads, width) to (batch, local_seq, degree * heads, width), contiguous."""
        if self.tokens.pieces:
            fields = [torch.cat([x[:, rows.lo : rows.hi] for rows in self.tokens.returned], 1) for x in fields]
        parts = [x.unflatten(1, (self.heads.degree, -1)) for x in fields]
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
        work = self.inner.collectives(packet.device).all_to_all(landed, packet)
        if packet.is_cuda:
            work.wait()  # the current stream waits, not the host
        else:
            self.inner.wait(work.wait)
        return landed


def _wide(statistic: torch.Tensor) -> torch.Tensor:
    """From (batch, heads, rows) to (batch, rows, heads, 1), as a field of a packet."""
    return statistic.transpose(1, 2).unsqueeze(3)


def _narrow(field: torch.Tensor) -> torch.Tensor:
    """The other way, contiguous."""
    return field.squeeze(3).transpose(1, 2).contiguous()


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
