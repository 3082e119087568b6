"""The largest attention logit of every head over a sequence that is sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.kernels.segments import visible
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules.load_balanced import layout_of
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import Group, channel_of
from dfa_megatron.runtime.comm.transport import Recv, Send
from dfa_megatron.runtime.cu_seqlens import describe, offsets_of
from dfa_megatron.runtime.prepare import refuse
from dfa_megatron.runtime.problem import Inputs, refuse_strangers, refuse_tensors
from dfa_megatron.runtime.request import DEFAULTS, Request
from dfa_megatron.sharding import CuSeqlens

_SCORES = 1 << 25
"""Scores that are in memory at once, of all heads."""


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
@torch.no_grad()
def max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    causal: bool | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Mask | None = None,
    cu_seqlens: CuSeqlens = None,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor:
    """Return the largest logit of each head over the whole sequence, float32 (heads,), on every rank; no gradient.

    Logits are scaled and capped, of the pairs that attend, without sinks and ALiBi. It is Transformer Engine's
    `max_logit`, by which QK-clip scales weights. Collective.

    It is a pass of its own: the products of queries and keys of a forward, and the keys once around the ring. A rank
    computes the rows that it holds, so "zigzag" is the layout that balances a causal mask.

    Args:
        q: (batch, local_seq, heads, head_dim), as for `dist_flash_attn_func`.
        k: (batch, local_seq, kv_heads, head_dim).
        cu_seqlens: global offsets of packed documents, as for `dist_flash_attn_varlen_func`; None for none.
        causal, group, softmax_scale, window_size, softcap, mask, layout: as for `dist_flash_attn_func`.
        config: its verify and timeouts are used.

    Raises:
        UnsupportedError: as for `dist_flash_attn_func`.
        DisagreementError: the ranks ask for different things, or run different calls.

    Source: section 2.2 of Kimi K2, arXiv 2507.20534.
    """
    verify = config.verify == "on"
    over = channel_of(group, verify=verify)
    rank, ranks = (0, 1) if over is None else (over.rank, over.size)
    try:
        refuse_strangers(q, k, k)
        offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, q.device)
        request = Request(
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            mask=mask,
            layout=layout if isinstance(layout, str) else "contiguous",
            cu_seqlens=offsets,
            config=config,
        )
        seen, whole = _checked(q, k, request, layout, rank, ranks)
    except UnsupportedError as error:
        refuse(error, over, verify=verify)
        raise
    if over is not None:
        with _compared(q, k, request, over):
            every, work = over.collectives(q.device).gather(_own(q, k, seen, whole, over))
            over.wait(work.wait) if q.device.type == "cpu" else work.wait()
        raw = torch.stack(every).amax(0)
    else:
        raw = _own(q, k, seen, whole, None)
    # Both grow with the product: the largest product has the largest logit.
    logits = raw * request.softmax_scale
    return (softcap * torch.tanh(logits / softcap) if softcap else logits).float()


def _checked(
    q: torch.Tensor, k: torch.Tensor, request: Request, layout: str | Layout, rank: int, ranks: int
) -> tuple[Mask, Layout]:
    """Return the mask, and the tokens of every rank; refuse what no attention takes."""
    if q.shape[1:2] != (0,):
        refuse_tensors(Inputs(q, k, k))
    request.check()
    if not 0 <= request.softcap < math.inf:
        raise UnsupportedError(f"softcap={request.softcap}", "it is positive and finite", "0.0 for none")
    length = q.shape[1] * ranks
    if isinstance(layout, Layout):
        length = layout.length
    elif request.cu_seqlens:
        length = request.cu_seqlens[-1]
    elif request.mask is not None:
        length = request.mask.length
    seen = request.mask_over(length)
    whole = layout if isinstance(layout, Layout) else layout_of(layout, seen, ranks)
    if (wanted := sum(map(len, whole.spans(rank)))) != q.shape[1]:
        what, why = f"{q.shape[1]} tokens on rank {rank}", f"the layout of {length} tokens has {wanted} there"
        raise UnsupportedError(what, why, "the part of shard_sequence, or another layout")
    return seen, whole


def _own(q: torch.Tensor, k: torch.Tensor, seen: Mask, whole: Layout, over: Channel | None) -> torch.Tensor:
    """Return the largest product of each head over the rows of this rank, -inf for none."""
    batch, _, heads, dim = q.shape
    peaks = q.new_full((heads,), -math.inf, dtype=accumulator_dtype(q.dtype))
    side = max(64, 1 << int(math.log2(_SCORES / (batch * heads)) / 2))
    queries = q.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
    for owner, keys in _around(k, whole, over):
        columns = keys.transpose(1, 2)
        for tile, row, column in _tiles(seen, whole, 0 if over is None else over.rank, owner, side):
            rows = queries[:, :, :, row : row + len(tile.q)].reshape(batch * k.shape[2], -1, dim)
            across = columns[:, :, column : column + len(tile.kv)].reshape(batch * k.shape[2], -1, dim)
            scores = _products(rows, across.transpose(1, 2)).view(batch, heads, len(tile.q), len(tile.kv))
            pairs = visible(tile.band, len(tile.q), len(tile.kv), q.device)
            scores = scores if pairs is None else scores.masked_fill_(~pairs, -math.inf)
            torch.maximum(peaks, scores.amax((0, 2, 3)), out=peaks)
    return peaks


def _products(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return a batch of matrix products, summed and kept in the accumulator's dtype."""
    wide = accumulator_dtype(rows.dtype)
    if rows.is_cuda and rows.dtype != wide and hasattr(torch.ops.aten.bmm, "dtype"):  # since PyTorch 2.8
        return torch.bmm(rows, columns, out_dtype=wide)
    return torch.bmm(rows.to(wide), columns.to(wide))


def _tiles(seen: Mask, whole: Layout, rank: int, owner: int, side: int) -> Iterator[tuple[Tile, int, int]]:
    """Yield (tile of at most `side` x `side`, its first row in this rank, its first key in the other)."""
    mine, theirs = whole.offsets(whole.of(rank)), whole.offsets(whole.of(owner))
    for q_chunk, row in mine.items():
        for kv_chunk, column in theirs.items():
            q, kv = whole.chunks[q_chunk], whole.chunks[kv_chunk]
            for tile in seen.restrict(q, kv):
                for top in range(tile.q.lo, tile.q.hi, side):
                    for left in range(tile.kv.lo, tile.kv.hi, side):
                        part = tile.restrict(Span(top, top + side), Span(left, left + side))
                        if part is not None:
                            yield part, row + part.q.lo - q.lo, column + part.kv.lo - kv.lo


def _around(k: torch.Tensor, whole: Layout, over: Channel | None) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its keys), this rank's first. The next ones travel around the ring while the caller computes."""
    if over is None:
        yield 0, k
        return
    connections, held = over.collectives(k.device), k.contiguous()
    for step in range(over.size):
        coming = k.new_empty(0)
        works = []
        if step < over.size - 1:
            rows = sum(map(len, whole.spans((over.rank - step - 1) % over.size)))
            coming = k.new_empty(k.shape[0], rows, *k.shape[2:])
            sends = [Send((over.rank + 1) % over.size, (held,))] if held.numel() else []
            works = connections.post(sends, [Recv((over.rank - 1) % over.size, (coming,))] if rows else [])
        yield (over.rank - step) % over.size, held
        for work in works:
            over.wait(work.wait) if k.device.type == "cpu" else work.wait()
        held = coming


def _compared(q: torch.Tensor, k: torch.Tensor, request: Request, over: Channel) -> AbstractContextManager[object]:
    """Return what compares this call with the other ranks'; a new kind of call is agreed on first. Collective."""
    if not request.verify:
        return nullcontext()
    facts = {
        "exchange": "the largest logits",
        "q": f"{q.shape[0]}, {tuple(q.shape[2:])}",
        "k": f"{k.shape[0]}, {tuple(k.shape[2:])}",
        "dtype": str(q.dtype),
        "device": over.place(q.device),
    }
    facts |= {name: repr(getattr(request, name)) for name in ("causal", "window_size", "softmax_scale", "softcap")}
    key = tuple(facts.items())
    if key not in over.agreed:
        with over.calls.preparing():
            over.agree(facts | {"thread": over.calls.thread})
        with over.collective():
            over.collectives(q.device)
        over.agreed[key] = None
    kind = f"largest logits of q {facts['q']}, {request.layout}, {describe(request.cu_seqlens)}"
    return over.running(Kind.of(f"{kind}, {request.mask and request.mask.name}", str(key)), q.device)
