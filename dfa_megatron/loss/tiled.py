"""One autograd function: numbers of each token over its logits, tile by tile; the backward makes the logits again.

Gradients are not made in the forward, as fused losses do for a mean. Here the gradient of each token is known in the
backward only: losses are masked, weighted and scaled after they are returned. Saved are the hidden states and a few
numbers per token; the recompute adds one matrix product to three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import DisagreementError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.loss.head import Head

_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By their names since PyTorch 2.13, or before."""

LABEL, LSE, ENTROPY, TOTAL = range(4)
"""The rows of a result: the label's logit, log-sum-exp, entropy in nats, and the sum of all logits."""

_AGREED = set[str]()
"""Losses that this rank has asked for when all of its ranks did, the first `_KEPT` of them."""

_KEPT = 64
"""A loss whose options change at every step is not waited for at every step."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a loss is made. first: the index of this rank's first row. differs: whether the ranks ask for others."""

    head: Head
    tile: int
    first: int
    entropy: bool
    total: bool
    differs: torch.Tensor | None = None

    def cuts(self, rows: int) -> Iterator[slice]:
        """Yield the tiles of this rank's rows; together with those of the other shards a tile has `tile` tokens."""
        step = max(1, self.tile // self.head.shards)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a tile's hidden states of all shards, one shard after another."""
        if self.head.shards == 1:
            return rows
        whole = rows.new_empty(rows.shape[0] * self.head.shards, rows.shape[1])
        _gather(whole, rows.contiguous(), group=self.head.group)
        return whole

    def scattered(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a gradient of `gathered`, for this rank's rows."""
        if self.head.shards == 1:
            return gradient
        mine = gradient.new_empty(gradient.shape[0] // self.head.shards, gradient.shape[1])
        _reduce_scatter(mine, gradient, group=self.head.group)
        return mine

    def logits(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of a tile, in float32, or float64 for float64."""
        logits = torch.nn.functional.linear(x, weight, bias).to(accumulator_dtype(x.dtype))
        if self.head.scale != 1:
            logits.mul_(self.head.scale)
        if self.head.softcap is not None:
            logits.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return logits


class Tiled(torch.autograd.Function):
    """Return (4, tokens): `LABEL`, `LSE`, and where the tiling asks for them `ENTROPY` and `TOTAL`.

    A label that no rank has gives NaN in `LABEL`.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        tiling: Tiling,
    ) -> torch.Tensor:
        rows, shards = hidden.shape[0], tiling.head.shards
        labels = labels.view(shards, rows) - tiling.first
        found = hidden.new_empty(6, shards, rows, dtype=accumulator_dtype(hidden.dtype))
        for cut in tiling.cuts(rows):
            logits = tiling.logits(tiling.gathered(hidden[cut]), weight, bias)
            found[:, :, cut] = _statistics(logits, labels[:, cut].flatten(), tiling).view(6, shards, -1)
            del logits  # before the next tile's are made
        result = _together(found.flatten(1), tiling)
        ctx.save_for_backward(hidden, weight, bias, labels, result)
        ctx.tiling = tiling
        return result

    @staticmethod
    @differentiable_once("a loss that is made by tiles", 0, 1, 2)
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: D102
        hidden, weight, bias, labels, result = ctx.saved_tensors
        tiling: Tiling = ctx.tiling
        rows, shards = hidden.shape[0], tiling.head.shards
        by_shard = torch.cat([gradient, result]).view(8, shards, rows)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        wide, needed = accumulator_dtype(weight.dtype), ((weight.shape, of_weight), (weight.shape[:1], of_bias))
        sums = [weight.new_zeros(shape, dtype=wide) if asked else None for shape, asked in needed]
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        for cut in tiling.cuts(rows):
            x = tiling.gathered(hidden[cut])
            d = _of_logits(
                tiling.logits(x, weight, bias), labels[:, cut].flatten(), by_shard[:, :, cut].flatten(1), tiling
            ).to(x.dtype)
            _add(d, x, *sums)
            if d_hidden is not None:
                d_hidden[cut] = tiling.scattered(d @ weight)
            del d, x
        if d_hidden is not None and shards < tiling.head.ranks:
            dist.all_reduce(d_hidden, group=tiling.head.group)
        d_weight, d_bias = (None if each is None else each.to(weight.dtype) for each in sums)
        return d_hidden, d_weight, d_bias, None, None


def best(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: Tiling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each token and its row on this rank, (tokens,) each; no autograd."""
    shape = tiling.head.shards, hidden.shape[0]
    highs, rows = (hidden.new_empty(shape, dtype=x) for x in (accumulator_dtype(hidden.dtype), torch.int64))
    with torch.no_grad():
        for cut in tiling.cuts(hidden.shape[0]):
            high, row = tiling.logits(tiling.gathered(hidden[cut]), weight, bias).max(dim=-1)
            highs[:, cut], rows[:, cut] = high.view(shape[0], -1), row.view(shape[0], -1)
    return highs.flatten(), rows.flatten()


def _statistics(logits: torch.Tensor, labels: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Return (6, tokens) over this rank's rows; the logits are overwritten.

    The largest logit m, Σ exp(z - m), the label's logit or 0, Σ (z - m) exp(z - m), Σ z, and 1 if the label is here.
    """
    here, row = _place(labels, logits)
    label = logits.gather(1, row)[:, 0].masked_fill_(~here, 0)
    total = logits.sum(1) if tiling.total else torch.zeros_like(label)
    high = logits.amax(1)
    below = logits.sub_(high[:, None])
    weights = below.exp() if tiling.entropy else below.exp_()
    summed = weights.sum(1)
    weighted = weights.mul_(below).sum(1) if tiling.entropy else torch.zeros_like(label)
    return torch.stack([high, summed, label, weighted, total, here.to(label.dtype)])


def _together(found: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Return the result of all ranks from (6, tokens) of each: two all-reduces for all tiles."""
    high, sums = found[0], found[1:]
    if (group := tiling.head.group) is not None:
        mine, high = high, high.clone()
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        if tiling.differs is not None:
            high = high.masked_fill(tiling.differs, float("nan"))
        down = mine - high
        summed, label, weighted, total, here = sums
        sums = torch.stack([summed * down.exp(), label, (weighted + down * summed) * down.exp(), total, here])
        dist.all_reduce(sums, group=group)
    summed, label, weighted, total, here = sums
    log = summed.log()
    return torch.stack([label.masked_fill(here == 0, float("nan")), high + log, log - weighted / summed, total])


def agree(head: Head, asked: str, beside: str = "") -> tuple[tuple[int, ...], torch.Tensor | None]:
    """Return the rows of every rank's weight, and whether the ranks ask for different losses; collective.

    It comes before messages whose sizes follow from what is asked; beside: what varies with the batch.

    Raises:
        DisagreementError: they do. Not on a GPU that asked for this before, or for many others.
    """
    rows = sum(head.weight.shape[:1])
    if head.group is None:
        return (rows,), None
    digest = int.from_bytes(hashlib.sha256((asked + beside).encode()).digest()[:7])
    mine = torch.full((2,), digest, device=head.weight.device)  # which a CUDA graph may capture
    mine[1:].fill_(rows)
    every = mine.new_empty(2 * head.ranks)
    _gather(every, mine, group=head.group)
    differs = _differs(every[::2], digest, asked, beside)
    return head.partition or tuple(every[1::2].tolist()), differs


def _differs(digests: torch.Tensor, digest: int, asked: str, beside: str = "") -> torch.Tensor:
    """Return whether ranks have another digest; raise it where the host may wait for that."""
    differs = (digests != digest).any()
    known = asked in _AGREED or len(_AGREED) >= _KEPT
    if not digests.is_cuda or not (known or torch.cuda.is_current_stream_capturing()):
        if differs:
            what = f"other ranks ask for another loss than {asked}{beside}, or refuse it"
            raise DisagreementError(f"{what}. What works: the same on all")
        _AGREED.update(() if known else (asked,))
    return differs


def _of_logits(logits: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Return the gradient of the product before scale and softcap; the logits are overwritten.

    numbers: (8, tokens), the gradient of the result, then the result.
    """
    to_label, to_lse, to_entropy, to_total, _, lse, entropy, _ = numbers[:, :, None]
    slope = None
    if (cap := tiling.head.softcap) is not None:
        slope = logits.div(cap).square_().neg_().add_(1)
    here, row = _place(labels, logits)
    below = logits.sub_(lse)
    if tiling.entropy:
        d = below.exp()
        d.mul_(below.add_(entropy).mul_(-to_entropy).add_(to_lse))
    else:
        d = below.exp_().mul_(to_lse)
    d.scatter_add_(1, row, to_label.masked_fill(~here[:, None], 0))
    if tiling.total:
        d.add_(to_total)
    if slope is not None:
        d.mul_(slope)
    return d if tiling.head.scale == 1 else d.mul_(tiling.head.scale)


def _place(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each label is among these rows, (tokens,), and a row that exists, (tokens, 1)."""
    rows = logits.shape[1]
    return (labels >= 0) & (labels < rows), labels.clamp(0, rows - 1)[:, None]


def _add(d: torch.Tensor, x: torch.Tensor, d_weight: torch.Tensor | None, d_bias: torch.Tensor | None) -> None:
    """Add a tile's part to the gradients of weight and bias."""
    if d_weight is not None:
        if d.dtype == d_weight.dtype:
            d_weight.addmm_(d.T, x)
        else:  # sums over tiles are not rounded
            d_weight.add_(d.T @ x)
    if d_bias is not None:
        d_bias.add_(d.sum(0, dtype=d_bias.dtype))
