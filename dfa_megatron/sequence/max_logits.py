"""The largest attention logit of every head over a sequence that is sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from zlib import crc32

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import outside_graphs, without_autocast
from dfa_megatron.kernels.segments import visible
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.rows import join
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import compared, telling
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, offsets_of, rows_of
from dfa_megatron.runtime.request import Inputs, Request, refuse_strangers, refuse_tensors

_SCORES = 1 << 25
"""Scores that are in memory at once, of all heads."""


@outside_graphs
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
    mask: Mask | Sequence[Mask] | None = None,
    cu_seqlens: CuSeqlens = None,
    layout: str | Layout = "contiguous",
) -> torch.Tensor:
    """Return the largest logit of each head over the whole sequence, float32 (heads,), on every rank; no gradient.

    Logits are scaled and capped, of the pairs that attend, without sinks. It is Transformer Engine's
    `max_logit`, by which QK-clip scales weights. Collective.

    It is a pass of its own: the products of queries and keys of a forward, and the keys of every rank to all. A rank
    computes the rows that it holds, so "zigzag" is the layout that balances a causal mask.

    Args:
        q: (batch, local_seq, heads, head_dim), as for `dist_flash_attn_func`.
        k: (batch, local_seq, kv_heads, head_dim).
        cu_seqlens: global offsets of packed documents, or a list of those of each row, as for
            `dist_flash_attn_varlen_func`; None for none.
        causal, group, softmax_scale, window_size, softcap, mask, layout: as for `dist_flash_attn_func`.

    Raises:
        UnsupportedError: as for `dist_flash_attn_func`.
        DisagreementError: the ranks ask for different things, or run different calls.

    Source: section 2.2 of Kimi K2, arXiv 2507.20534.
    """
    with telling(group) as over:
        rank, ranks = (0, 1) if over is None else (over.rank, over.size)
        refuse_strangers(q, k, k)
        refuse_tensors(Inputs(q, k, k))
        if rows := tuple(mask) if isinstance(mask, Sequence) else rows_of(cu_seqlens, q):
            (q, k, *_), joined, layout = join(Inputs(q, k, k), rows, layout, ranks)
            mask, cu_seqlens = (joined, None) if isinstance(joined, Mask) else (None, joined)
        assert not isinstance(mask, Sequence), "joined above"
        request = Request(
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            mask=mask,
            layout=layout,
            cu_seqlens=() if cu_seqlens is None else offsets_of(cu_seqlens, q.device),
        )
        if not 0 <= softcap < math.inf:
            raise UnsupportedError(f"softcap={softcap}", "it is positive and finite", "0.0 for none")
        request, seen, whole = request.settled(ranks, rank, Inputs(q, k, k))
    facts = {"q": f"{q.shape[0]}, {tuple(q.shape[2:])}", "kv_heads": f"{k.shape[2]}", "dtype": f"{q.dtype}"}
    facts |= {"scale": f"{request.softmax_scale}", "softcap": f"{softcap}"}
    facts["tokens of a rank"] = f"{whole.length} in all"
    about = f"mask {seen.name} #{crc32(repr(seen.tiles).encode()):08x}", f"layout {request.layout}"
    exchange = compared("the largest logits", over, facts, q.device, *about)
    with without_autocast(), exchange.running(0, q.device):
        peaks = _peaks(q, k, seen, whole, over)
    # Both grow with the product: the largest product has the largest logit.
    logits = peaks * request.softmax_scale
    return (softcap * torch.tanh(logits / softcap) if softcap else logits).float()


def _peaks(q: torch.Tensor, k: torch.Tensor, seen: Mask, whole: Layout, over: Channel | None) -> torch.Tensor:
    """Return the largest product of each head over all ranks, which send their keys in turn."""
    peaks = q.new_full((q.shape[2],), -math.inf, dtype=accumulator_dtype(q.dtype))
    rank = 0 if over is None else over.rank
    for owner in range(whole.ranks):
        keys = k if owner == rank else k.new_empty(k.shape[0], whole.tokens(owner, "kv"), *k.shape[2:])
        if over is not None and keys.numel():
            over.communicator(q.device).broadcast(keys.contiguous(), owner)
            over.spoiled(keys)
        _raise(peaks, q, keys, _tiles(seen, whole, rank, owner, q.shape[0] * q.shape[2]))
    return peaks if over is None else torch.stack(over.gather(peaks)).amax(0)


def _tiles(seen: Mask, whole: Layout, rank: int, owner: int, heads: int) -> Iterator[tuple[Tile, int, int]]:
    """Yield (tile of a rank's queries and an owner's keys, its first row there, its first key there)."""
    side = max(64, 1 << int(math.log2(_SCORES / heads) / 2))
    theirs = whole.offsets(whole.of(owner, "kv"))
    for q_chunk, row in whole.offsets(whole.of(rank, "q")).items():
        q = whole.chunks[q_chunk]
        rows = seen.restrict(q, Span(0, seen.length))
        for kv_chunk, column in theirs.items():
            kv = whole.chunks[kv_chunk]
            for tile in filter(None, (tile.restrict(q, kv) for tile in rows)):
                for top in range(tile.q.lo, tile.q.hi, side):
                    for left in range(tile.kv.lo, tile.kv.hi, side):
                        if part := tile.restrict(Span(top, top + side), Span(left, left + side)):
                            yield part, row + part.q.lo - q.lo, column + part.kv.lo - kv.lo


def _raise(peaks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, tiles: Iterator[tuple[Tile, int, int]]) -> None:
    """Raise the peaks of the heads to the largest products in the tiles, summed in the accumulator's dtype."""
    (batch, _, heads, dim), kv_heads, wide = q.shape, k.shape[2], peaks.dtype
    queries, keys = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4), k.permute(0, 2, 3, 1)
    for tile, row, column in tiles:
        rows = queries[:, :, :, row : row + len(tile.q)].reshape(batch * kv_heads, -1, dim)
        columns = keys[:, :, :, column : column + len(tile.kv)].reshape(batch * kv_heads, dim, -1)
        if q.is_cuda and q.dtype != wide and hasattr(torch.ops.aten.bmm, "dtype"):  # since PyTorch 2.8
            products = torch.bmm(rows, columns, out_dtype=wide)
        else:
            products = torch.bmm(rows.to(wide), columns.to(wide))
        pairs = visible(tile.band, len(tile.q), len(tile.kv), q.device)
        scores = products.view(batch, heads, len(tile.q), len(tile.kv))
        scores = scores if pairs is None else scores.masked_fill_(~pairs, -math.inf)
        torch.maximum(peaks, scores.amax((0, 2, 3)), out=peaks)
