"""The choice of an indexer: the keys with the highest scores of every query, over all ranks.

    score(i, j) = sum over heads h of weights[i, h] * relu(index_q[i, h] . index_k[j])        for the j that i sees

Scores come from blocks of a fixed grid: so many rows and keys of a document from its first token on. A block has one
shape wherever it is computed, padded with zeros. So one process and several ranks choose the same keys.

Source: DeepSeek-V3.2-Exp, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.indexed.whole import MEMORY, ROWS, Whole, kernels_for
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import outside_graphs, without_autocast
from dfa_megatron.kernels.segments import visible
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Component, Mask, components
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.comm.compared import facts_of_tokens, telling
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.cu_seqlens import CuSeqlens
from dfa_megatron.runtime.request import DEFAULTS

KEYS = 4096
"""Keys of the largest block of scores."""

SCORED = 1 << 28
"""Bytes of scores that kernels make at a time: 512 rows of 128K tokens."""

SAME_WIDTH = 1024
"""Kernels score so many keys at a time, or a multiple."""


@outside_graphs
@torch.no_grad()
def index_topk(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    topk: int,
    *,
    group: Group = None,
    cu_seqlens: CuSeqlens = None,
    mask: Mask | Sequence[Mask] | None = None,
    return_lse: bool = False,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the keys that this rank's queries choose, each among those that it sees; collective.

    The highest score is first, among equal ones the lowest position. Rows that see much are scored by ranks that have
    little to score. In a checkpointed region (`remat.context_fn`) the recompute takes the first pass's choice. A choice
    has no gradient: `index_loss` trains the indexer.

    Args:
        index_q: (batch, local_seq, heads, dim), after its position embedding, float64, float32, bfloat16 or float16.
        index_k: (batch, local_seq, dim), the one key of all heads.
        weights: (batch, local_seq, heads), with all factors in them. A factor of the products that is above 0 may be
            here too, because it passes through ReLU.
        topk: keys of a query, at least 1.
        group: the ranks that share the sequence, in the order of their tokens.
        cu_seqlens: global offsets of packed documents, or a list of those of each row; None: a row is one document.
            Padding is a document of its own.
        mask: in place of both, a value of `dfa_megatron.masks`, or a list of one for each row.
        return_lse: return the logarithm of the sum over all keys that a query sees of exp(score), too.
        layout: the tokens that a rank holds, as for `dist_flash_attn_func`.
        config: its verify is used.

    Returns:
        int32 (batch, local_seq, topk), global positions in the row, -1 behind the last one where a query sees fewer. If
        asked, the log-sum (batch, local_seq), float32 (float64 for float64).

    Raises:
        UnsupportedError: shapes, dtypes, documents and layout do not fit together.
        DisagreementError: the ranks ask for different choices, or run different calls.
    """
    with telling(group, config) as over:
        check_index(index_q, index_k, weights)
        if type(topk) is not int or topk < 1:
            raise UnsupportedError(f"topk={topk!r}", "it is a number of keys", "an integer from 1, such as 2048")
        frame = active_frame()
        if frame is not None and not frame.recording:
            COUNTERS.reused += 1
            positions, lse = frame.take()
            return (positions, lse) if return_lse else positions
        whole, device = Whole.of(index_q, over, layout, cu_seqlens, mask), index_q.device
        facts = {"topk": str(topk), **facts_of_tokens(index_q, 1), "weights": str(weights.dtype)}
        exchange = whole.exchange("the choice of an indexer", facts, device)
    q, k, w = (x.flatten(0, 1) for x in (index_q, index_k, weights))
    keys, rows = whole.keys(device), whole.rows(device)
    with exchange.running(0, device), without_autocast():
        k, q, w = keys.run(k, over=over), rows.run(q, over=over), rows.run(w, over=over)
        best, total = choose(q, k, w, topk, whole.seen, whole.scored())
        best, total = (rows.back().run(x, over=over) for x in (best, total))
    positions, lse = whole.by_row(best), total.view(index_q.shape[:2])
    if frame is not None:
        frame.record(positions, lse)
    return (positions, lse) if return_lse else positions


def check_index(index_q: torch.Tensor, index_k: torch.Tensor, weights: torch.Tensor) -> None:
    """Refuse tensors of an indexer that do not fit together."""
    shapes = f"index_q {tuple(index_q.shape)}, index_k {tuple(index_k.shape)}, weights {tuple(weights.shape)}"
    fits = index_q.dim() == 4 and index_k.shape == (*index_q.shape[:2], index_q.shape[3])
    if not fits or weights.shape != index_q.shape[:3] or 0 in (index_q.shape[0], *index_q.shape[2:]):
        instead = "(batch, local_seq, heads, dim), (batch, local_seq, dim) and (batch, local_seq, heads)"
        raise UnsupportedError(shapes, "they do not fit together", instead)
    kinds = {(x.dtype, x.device) for x in (index_q, index_k)}
    floats = index_q.is_floating_point() and weights.is_floating_point()
    if len(kinds) > 1 or not floats or weights.device != index_q.device:
        named = {"index_q": index_q, "index_k": index_k, "weights": weights}
        what = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in named.items())
        why = "both are of one floating dtype, on one device with weights"
        raise UnsupportedError(what, why, "index_k.to(index_q)")


class ScoreBlock(NamedTuple):
    """Rows of a block of the grid. grid: all of its rows. rows: those of this rank. at: the first in its tensors.

    part: the document, or another component of the mask. keys: of a block.
    """

    grid: Span
    rows: Span
    at: int
    part: Component
    keys: int

    def padded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of x as those of the whole block, zeros where they are not this rank's."""
        return _padded(x[self.at : self.at + len(self.rows)], self.rows.lo - self.grid.lo, len(self.grid), dtype)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of those of the whole block."""
        return x[self.rows.lo - self.grid.lo : self.rows.hi - self.grid.lo]

    def columns(self, device: torch.device) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yield the keys of the blocks that some of the rows see, in order, and bool (rows, keys): which of them."""
        for left in range(self.part.span.lo, self.part.span.hi, self.keys):
            columns = Span(left, left + self.keys)
            if tiles := [part for tile in self.part.tiles if (part := tile.restrict(self.rows, columns))]:
                seen = torch.zeros(len(self.grid), self.keys, dtype=torch.bool, device=device)
                for tile in tiles:
                    q, kv = tile.q.shift(-self.grid.lo), tile.kv.shift(-left)
                    pairs = visible(tile.band, len(q), len(kv), device)
                    seen[q.lo : q.hi, kv.lo : kv.hi] |= True if pairs is None else pairs
                yield columns & self.part.span, seen


def blocks(seen: Mask, spans: Sequence[Span], size: int) -> Iterator[ScoreBlock]:
    """Yield the blocks of rows, which lie one behind another; a block's tensors take `size` bytes a pair."""
    at, parts = 0, components(seen)
    for span in spans:
        for part in parts:
            inside = part.span & span
            if len(inside) and part.work:
                most = 1 << (len(part.span) - 1).bit_length()
                rows = min(ROWS, most)
                keys = min(KEYS, most, 1 << max(4, int(math.log2(MEMORY / (rows * size)))))
                first = part.span.lo + (inside.lo - part.span.lo) // rows * rows
                for top in range(first, inside.hi, rows):
                    grid = Span(top, top + rows)
                    mine = grid & inside
                    yield ScoreBlock(grid, mine, at + mine.lo - span.lo, part, keys)
        at += len(span)


def choose(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int, seen: Mask, spans: Sequence[Span]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choice (rows, topk), int32, and the log-sum (rows,) of the rows of `spans`; of one sequence.

    q: (rows, heads, dim). k: (tokens, dim), of the whole sequence. weights: (rows, heads).
    """
    rows, heads, _ = q.shape
    wide = accumulator_dtype(q.dtype)
    if (kernels := kernels_for(q)) is not None and all(part.is_document or not part.work for part in components(seen)):
        return _by_kernels(kernels, (q, k, weights), topk, seen, spans)
    best = torch.full((rows, topk), -1, dtype=torch.int32, device=q.device)
    total = torch.full((rows,), -math.inf, dtype=wide, device=q.device)
    for block in blocks(seen, spans, heads * wide.itemsize):
        queries, w = block.padded(q, wide), block.padded(weights, wide)
        scores, places = queries.new_empty(len(queries), 0), best.new_empty(len(queries), 0)
        lse = total.new_full((len(queries),), -math.inf)
        for columns, pairs in block.columns(q.device):
            keys = _padded(k[columns.lo : columns.hi], 0, block.keys, wide)
            new = scores_of(queries, keys, w)[0].masked_fill_(~pairs, -math.inf)
            lse = torch.logaddexp(lse, new.logsumexp(1))
            at = torch.arange(columns.lo, columns.lo + block.keys, dtype=best.dtype, device=q.device)
            # Those that are kept come first, and are of lower positions: a stable sort decides between equals.
            scores, order = torch.cat([scores, new], 1).sort(dim=1, descending=True, stable=True)
            scores = scores[:, :topk]
            places = torch.cat([places, at.expand_as(new)], 1).gather(1, order[:, :topk])
        places.masked_fill_(scores == -math.inf, -1)
        mine = slice(block.at, block.at + len(block.rows))
        best[mine, : places.shape[1]], total[mine] = block.own(places), block.own(lse)
    return best, total


def _by_kernels(
    kernels: Any, index: tuple[torch.Tensor, torch.Tensor, torch.Tensor], topk: int, seen: Mask, spans: Sequence[Span]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `choose` does, of causal documents, some rows with all of their keys at a time."""
    (q, k, weights), parts = index, components(seen)
    own = torch.cat([torch.arange(span.lo, span.hi) for span in (*spans, Span(0, 0))])
    at = torch.searchsorted(torch.tensor([part.span.lo for part in parts]), own, right=True) - 1
    first = torch.tensor([part.span.lo if part.work else seen.length for part in parts])[at]
    best = torch.full((len(q), topk), -1, dtype=torch.int32, device=q.device)
    total = torch.full((len(q),), -math.inf, dtype=torch.float32, device=q.device)
    step = max(1, SCORED // (4 * seen.length))
    for rows in (slice(top, top + step) for top in range(0, len(q), step)):
        begin, end = int(first[rows].min()), int(own[rows].max()) + 1
        if begin < end:
            # Few widths, for which kernels keep what they prepare.
            begin, end = begin - begin % SAME_WIDTH, min(end + -end % SAME_WIDTH, seen.length)
            sees = first[rows].to(q.device, torch.int32), own[rows].to(q.device, torch.int32)
            found = kernels.scores(q[rows], k, weights[rows], sees, begin, end)
            places = kernels.best(found, begin, topk)
            best[rows, : places.shape[1]], total[rows] = places, found.logsumexp(1)
    return best, total


def scores_of(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (rows, keys), and relu(q . k), (rows, heads, keys).

    k: (keys, dim), or of each row its own (rows, keys, dim).
    """
    if k.dim() == 2:
        products = (q.flatten(0, 1) @ k.T).relu_().unflatten(0, q.shape[:2])
    else:
        products = (q @ k.transpose(1, 2)).relu_()
    # A sum of negative zeros is one; they would be below zero for some sorts.
    return torch.bmm(weights[:, None], products)[:, 0].add_(0.0), products


def _padded(x: torch.Tensor, before: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return x as rows of a block of zeros, from row `before` on."""
    found = x.new_zeros(rows, *x.shape[1:], dtype=dtype)
    found[before : before + len(x)] = x
    return found
