"""The loss of an indexer: how far its softmax is from attention's own probabilities, over chosen keys or over all.

    teacher(i, j) = sum over heads h of exp(scale * q[i, h] . k[j] - lse[i, h]), divided by its sum over the keys j
    loss = mean over queries i of the sum over j of teacher(i, j) * (log teacher(i, j) - log_softmax(score(i, .))[j])

The teacher is a number and has no gradient. Gradients are made beside the loss, in one pass: it is a scalar, so the
backward only scales them, and sends nothing.

Source: DeepSeek-V3.2-Exp, section 2.1.1, the dense warm-up and the sparse stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.indexed.chosen import check_positions, probabilities
from dfa_megatron.indexed.topk import blocks, check_index, scores_of
from dfa_megatron.indexed.whole import MEMORY, Whole, kernels_for, scale_of
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once, outside_graphs, without_autocast
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.comm.compared import Compared, facts_of_tokens, telling
from dfa_megatron.runtime.comm.groups import Group, resolve
from dfa_megatron.runtime.cu_seqlens import CuSeqlens
from dfa_megatron.runtime.request import DEFAULTS


@outside_graphs
def index_loss(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    valid: torch.Tensor | None = None,
    group: Group = None,
    tp_group: Group = "",
    cu_seqlens: CuSeqlens = None,
    mask: Mask | Sequence[Mask] | None = None,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor:
    """Return this rank's part of the indexer's loss; the sum over the ranks of the group is the loss. Collective.

    It is the mean over the queries of all ranks that are valid and have keys. Gradients are those of the sum of the
    ranks' losses: of index_q, index_k and weights. q, k and lse are read as numbers.

    Args:
        index_q, index_k, weights: as for `index_topk`.
        q, k: (batch, local_seq, heads, head_dim) and (batch, local_seq, kv_heads, head_dim), of the attention; any
            numbers behind head_dim in k, such as values, are not read.
        lse: (batch, heads, local_seq), which the attention returned.
        positions: the keys that the attention read, of `index_topk`. None: all that a query sees, for the warm-up.
        softmax_scale: of the attention; head_dim ** -0.5 if None.
        valid: bool (batch, local_seq), the queries that count; None for all. Padding does not.
        tp_group: the ranks that share the attention's heads; each holds the whole indexer and gets the same loss.
            "": this rank has all heads.
        group, cu_seqlens, mask, layout, config: as for `index_topk`; each is needed here as it is there.

    Returns:
        A scalar, float32 (float64 for float64).

    Raises:
        UnsupportedError: shapes, dtypes, positions and layout do not fit together.
        DisagreementError: the ranks ask for different losses, or run different calls.
    """
    alone: Any = nullcontext()
    with telling(group, config) as over, alone if tp_group == "" else telling(tp_group, config) as sharing:
        check_index(index_q, index_k, weights)
        _check_attention(index_q, q, k, lse, valid)
        whole, device = Whole.of(index_q, over, layout, cu_seqlens, mask), q.device
        chosen = None if positions is None else check_positions(positions, q, whole, False)
        heads_of = None if tp_group == "" else resolve(tp_group)
        scale = scale_of(softmax_scale, q.shape[3])
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (index_q, index_k, weights))
        facts = facts_of_tokens(index_q, 1) | {"gradient": f"{trains}", "scale": f"{scale}", "all": f"{chosen is None}"}
        if heads_of is not None:
            here, told = torch.device("cpu"), facts | {"valid": "all" if valid is None else "some"}
            told |= {"heads of a key": f"{q.shape[2] // k.shape[2]}", "topk": f"{chosen is None or chosen.shape[1]}"}
            beside = replace(whole, over=sharing)
            with beside.exchange("the loss of an indexer, between ranks that share heads", told, here).running(0, here):
                pass  # they have met, before they wait for one another on a device
        facts |= {"q": f"{tuple(q.shape[2:])}", "keys": f"{tuple(k.shape[2:])}"}
        facts["dtypes"] = ", ".join(f"{x.dtype}" for x in (weights, q, lse))
        exchange = whole.exchange("the loss of an indexer", facts, device)
    seen = torch.ones(index_q.shape[:2], dtype=torch.bool, device=device) if valid is None else valid
    attention = q.detach().flatten(0, 1), k.detach().flatten(0, 1), lse.detach().transpose(1, 2).flatten(0, 1)
    call = _LossCall(whole, exchange, *attention, chosen, seen.flatten(), scale, heads_of)
    given = (x.flatten(0, 1) for x in (index_q, index_k, weights))
    found: torch.Tensor = _IndexLoss.apply(*given, call, trains)  # type: ignore[no-untyped-call]
    return found


def _check_attention(
    index_q: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, valid: torch.Tensor | None
) -> None:
    """Refuse what does not belong to the same tokens."""
    tokens = index_q.shape[:2]
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, lse {tuple(lse.shape)} for index_q {tuple(index_q.shape)}"
    if q.dtype != k.dtype or not q.is_floating_point() or not lse.is_floating_point():
        what = f"q {q.dtype}, k {k.dtype}, lse {lse.dtype}"
        raise UnsupportedError(what, "q and k are of one floating dtype", "those that attention took, and its lse")
    fits = q.dim() == k.dim() == 4 and q.shape[:2] == k.shape[:2] == tokens and 0 < q.shape[3] <= k.shape[3]
    if not fits or 0 in k.shape[2:] or q.shape[2] % k.shape[2] or lse.shape != (tokens[0], q.shape[2], tokens[1]):
        instead = "(batch, local_seq, heads, head_dim), k with kv_heads, lse (batch, heads, local_seq)"
        raise UnsupportedError(shapes, "they do not fit together", instead)
    if valid is not None and (valid.dtype != torch.bool or valid.shape != tokens):
        what = f"valid {tuple(valid.shape)}, {valid.dtype}"
        raise UnsupportedError(what, "each query counts or not", "bool (batch, local_seq)")


@dataclass(frozen=True, slots=True)
class _LossCall:
    """Of the attention q (rows, heads, head_dim), k (tokens, kv_heads, head_dim) and lse (rows, heads), and the rest.

    chosen: (rows, topk), or None for all keys. valid: bool (rows,). heads_of: the ranks that share the heads.
    """

    whole: Whole
    exchange: Compared
    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    chosen: torch.Tensor | None
    valid: torch.Tensor
    scale: float
    heads_of: dist.ProcessGroup | None


class _Queries(NamedTuple):
    """Of some rows: index_q (rows, heads, dim), weights (rows, heads), the attention's q and lse, and bool (rows,)."""

    index_q: torch.Tensor
    weights: torch.Tensor
    q: torch.Tensor
    lse: torch.Tensor
    valid: torch.Tensor


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index_q: torch.Tensor, index_k: torch.Tensor, weights: torch.Tensor, call: _LossCall, trains: bool
    ) -> torch.Tensor:
        """Tensors of this rank's rows: (rows, heads, dim), (rows, dim), (rows, heads)."""
        whole, over = call.whole, call.whole.over
        keys, moved = whole.keys(index_q.device), whole.rows(index_q.device)
        rows = _Queries(index_q, weights, call.q, call.lse, call.valid)
        with call.exchange.running(0, index_q.device), without_autocast():
            every = keys.run(index_k, over=over), keys.run(call.k, over=over)
            if dense := call.chosen is None:  # the work is that of all pairs: rows go to the ranks that score them
                rows = _Queries(*(moved.run(x, over=over) for x in rows))
            served = not dense and None not in (kernels_for(index_q, adds=True), kernels_for(call.q))
            sums = (_KernelSums if served else _Sums)(rows, every, call)
            sums.add(trains)
            count = (sums.count if over is None else torch.stack(over.gather(sums.count)).sum(0)).clamp(min=1)
            if trains:
                dq, dw = sums.dq / count, sums.dw / count
                if dense:
                    dq, dw = (moved.back().run(x, over=over) for x in (dq, dw))
                dk = keys.back().run(sums.dk / count, over=over)
                kept = [torch.promote_types(x.dtype, torch.bfloat16) for x in (index_q, index_k, weights)]
                # Float16 has no room for a factor that scales losses, nor for what it scales: it becomes float32.
                ctx.save_for_backward(*map(torch.Tensor.to, (dq, dk, dw), kept))
        return (sums.loss / count)[0]

    @staticmethod
    @differentiable_once("the loss of an indexer", 0, 1, 2)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(x * gradient.to(x.dtype) for x in ctx.saved_tensors), None, None  # which autograd rounds


class _KeyGroup(NamedTuple):
    """Some rows with some keys. keys: their places, (keys,), or (rows, keys) of each row its own. seen (rows, keys)."""

    keys: torch.Tensor
    seen: torch.Tensor


class _Sums:
    """Sums over rows: the loss, how many rows count, and gradients; all in the accumulator's dtype."""

    def __init__(self, rows: _Queries, keys: tuple[torch.Tensor, torch.Tensor], call: _LossCall) -> None:
        self.rows, self.call, (self.index_k, self.k) = rows, call, keys
        self.wide = accumulator_dtype(rows.index_q.dtype)
        self.loss, self.count = (rows.index_q.new_zeros(1, dtype=self.wide) for _ in range(2))
        like = rows.index_q, rows.weights, self.index_k
        self.dq, self.dw, self.dk = (torch.zeros(x.shape, dtype=self.wide, device=x.device) for x in like)

    def add(self, trains: bool) -> None:
        """Add all rows; gradients where it trains."""
        for at, parts in self._steps():
            rows = _Queries(*(x[at] for x in self.rows))
            norm = rows.lse.new_zeros(len(rows.q), 1, dtype=self.wide)
            lse = torch.full_like(norm, -math.inf)
            once = [self._scored(rows, part) for part in parts] if len(parts) == 1 else None
            for teacher, scores, _ in once or (self._scored(rows, part) for part in parts):
                norm += teacher.sum(1, keepdim=True)
                lse = torch.logaddexp(lse, scores.logsumexp(1, keepdim=True))
            counts = rows.valid[:, None] & (norm > 0)
            self.count += counts.sum()
            again = once or (self._scored(rows, part) for part in parts)  # of many keys, nothing is kept
            for part, (teacher, scores, products) in zip(parts, again, strict=True):
                teacher, log = (teacher / norm).masked_fill_(~counts, 0.0), scores - lse
                self.loss += (torch.xlogy(teacher, teacher) - teacher * log.masked_fill(~part.seen, 0.0)).sum()
                if trains:
                    student = log.exp().masked_fill_(~(counts & part.seen), 0.0)
                    self._add_gradients(at, part, products, student - teacher)

    def _add_gradients(self, at: slice, part: _KeyGroup, products: torch.Tensor, dscores: torch.Tensor) -> None:
        """Add those of some rows' scores."""
        q, w = self.rows.index_q[at].to(self.wide), self.rows.weights[at].to(self.wide)
        self.dw[at] += (products @ dscores[..., None])[..., 0]
        d = w[..., None] * dscores[:, None] * (products > 0)
        near = self.index_k[part.keys].to(self.wide)
        self.dq[at] += d @ near
        if part.keys.dim() == 1:
            self.dk.index_add_(0, part.keys, d.permute(2, 0, 1).flatten(1) @ q.flatten(0, 1))
        else:
            self.dk.index_add_(0, part.keys.flatten(), (d.transpose(1, 2) @ q).flatten(0, 1))

    def _scored(self, rows: _Queries, part: _KeyGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the probabilities summed over heads, the scores, and the products before their sum over heads."""
        wide, k, dim = self.wide, self.k, rows.q.shape[2]
        group, teacher = rows.q.shape[1] // k.shape[1], torch.zeros_like(part.seen, dtype=wide)
        for at in range(k.shape[1]):
            heads = slice(at * group, (at + 1) * group)
            near = k[part.keys, at, :dim].to(wide).transpose(-1, -2)
            scores = (rows.q[:, heads].to(wide) @ near * self.call.scale).masked_fill_(~part.seen[:, None], -math.inf)
            teacher += probabilities(scores, rows.lse[:, heads].to(wide)).sum(1)
        q, w = rows.index_q.to(wide), rows.weights.to(wide)
        scores, products = scores_of(q, self.index_k[part.keys].to(wide), w)
        return self._over_heads(teacher), scores.masked_fill_(~part.seen, -math.inf), products

    def _over_heads(self, teacher: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks that share the heads."""
        if self.call.heads_of is not None:
            dist.all_reduce(teacher, group=self.call.heads_of)
        return teacher

    def _steps(self) -> Iterator[tuple[slice, list[_KeyGroup]]]:
        """Yield rows with all of the keys that they are compared over."""
        q, k, chosen = self.rows.index_q, self.k, self.call.chosen
        heads = max(q.shape[1], self.rows.q.shape[1] // k.shape[1])
        if chosen is None:
            size = heads * self.wide.itemsize
            for block in blocks(self.call.whole.seen, self.call.whole.scored(), size):
                parts = [
                    _KeyGroup(torch.arange(span.lo, span.hi, device=q.device), block.own(seen)[:, : len(span)])
                    for span, seen in block.columns(q.device)
                ]
                yield slice(block.at, block.at + len(block.rows)), parts
            return
        size = max(1, chosen.shape[1]) * max(heads, q.shape[2], k.shape[2]) * self.wide.itemsize
        step = max(1, MEMORY // size)
        for first in range(0, len(q), step):
            mine = chosen[first : first + step]
            yield slice(first, first + step), [_KeyGroup(mine.clamp(min=0).long(), mine >= 0)]


class _KernelSums(_Sums):
    """The same over chosen keys by Triton's kernels. Keys are -1 where a row has none; no products are kept."""

    def _add_gradients(self, at: slice, part: _KeyGroup, products: torch.Tensor, dscores: torch.Tensor) -> None:
        from dfa_megatron.kernels.triton import indexer

        index = self.rows.index_q[at], self.index_k, self.rows.weights[at]
        indexer.add_gradients(index, part.keys, dscores, (self.dq[at], self.dk, self.dw[at]))

    def _scored(self, rows: _Queries, part: _KeyGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from dfa_megatron.kernels.triton import indexer

        index, attention = (rows.index_q, self.index_k, rows.weights), (rows.q, self.k, rows.lse.float())
        teacher, scores = indexer.scored(index, attention, part.keys, self.call.scale)
        return self._over_heads(teacher), scores, teacher.new_empty(0)

    def _steps(self) -> Iterator[tuple[slice, list[_KeyGroup]]]:
        assert self.call.chosen is not None
        step = max(1, MEMORY // (4 * max(1, self.call.chosen.shape[1])))
        for number, mine in enumerate(self.call.chosen.split(step)):
            yield slice(number * step, (number + 1) * step), [_KeyGroup(mine, mine >= 0)]
