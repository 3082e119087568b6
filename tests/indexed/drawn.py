"""A random case of learned-sparse attention, and its comparison with the oracle on one rank of several."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dfa_megatron.indexed import index_loss, index_topk, sparse_attn
from dfa_megatron.plan.language.layout import Layout, of_lengths
from dfa_megatron.sharding import positions_of
from tests.support import indexed_oracle as oracle
from tests.support.packs import drawn_layout, random_offsets
from tests.support.plan_cases import Case, heterogeneous_masks

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Drawn:
    """One case, the same on every rank; tensors are of whole sequences.

    offsets: of the documents of every row. padding: the tokens at the end of every row that do not count.
    masks: causal ones of the rows, in place of documents, trees among them. latent: keys hold the values.
    """

    length: int
    layout: Layout
    offsets: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]
    masks: tuple[Case, ...]
    topk: int
    latent: bool
    per_row: bool
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sinks: torch.Tensor | None
    dout: torch.Tensor

    @property
    def valid(self) -> torch.Tensor:
        """Return which tokens count, bool (batch, length)."""
        return torch.stack([torch.arange(self.length) < self.length - padding for padding in self.padding])

    @property
    def seen(self) -> list[torch.Tensor]:
        """Return of every row which tokens see which, bool (length, length)."""
        documents = [oracle.visible(self.length, offsets) for offsets in self.offsets]
        return [torch.from_numpy(case.dense) for case in self.masks] or documents


def drawn(seed: int, ranks: int) -> Drawn:
    """Draw a case: ties and none, choices below and above the length, documents, padding, layouts, kinds of heads."""
    draw, own = random.Random(seed), torch.Generator().manual_seed(seed)
    length, batch = draw.randint(1, 40), draw.randint(1, 2)
    layout = drawn_layout(draw, ranks, length)
    if draw.random() < 0.2:  # all tokens on one rank
        layout = of_lengths([length if rank == ranks // 2 else 0 for rank in range(ranks)])
    per_row = draw.random() < 0.4
    padding = [draw.randint(0, length // 3) if per_row and draw.random() < 0.5 else 0 for _ in range(batch)]
    offsets = [(*random_offsets(length - n, draw), *([length] if n else [])) for n in padding]
    if not per_row:
        offsets = [draw.choice([(0, length), offsets[0]])] * batch
    heads, dim = draw.randint(1, 4), draw.randint(1, 5)
    shapes = (batch, length, heads, dim), (batch, length, dim), (batch, length, heads)
    if draw.random() < 0.6:  # sums of small integers are exact, and often equal
        index = [torch.randint(-2, 3, shape, generator=own).double() for shape in shapes]
    else:
        index = [torch.randn(shape, generator=own, dtype=torch.float64) for shape in shapes]
    latent = draw.random() < 0.4
    kv_heads = 1 if latent else draw.choice([1, 2])
    q_heads, wide, width = kv_heads * draw.choice([1, 2, 3]), draw.choice([4, 7]), draw.choice([3, 4])
    q, k, v, dout = (
        torch.randn(batch, length, *shape, generator=own, dtype=torch.float64)
        for shape in ((q_heads, wide), (kv_heads, wide), (kv_heads, width), (q_heads, width))
    )
    sinks = torch.randn(q_heads, generator=own, dtype=torch.float64) if draw.random() < 0.4 else None
    some = [case for case in heterogeneous_masks(length, draw) if not np.triu(case.dense, 1).any()]
    masks = [draw.choice(some) for _ in range(batch if not per_row and draw.random() < 0.4 else 0)]
    return Drawn(
        length=length,
        layout=layout,
        offsets=tuple(offsets),
        padding=tuple(padding),
        masks=tuple(masks),
        topk=draw.choice([1, 2, draw.randint(1, length), length, length + 3]),
        latent=latent,
        per_row=per_row,
        index=(index[0], index[1], index[2]),
        qkv=(q, k, k[..., :width] if latent else v),
        sinks=sinks,
        dout=dout,
    )


@dataclass
class Wanted:
    """What one process finds: choices, (out, lse), the losses of the sparse stage and the warm-up, and gradients."""

    choices: list[list[list[int]]]
    out: torch.Tensor
    lse: torch.Tensor
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def wanted(case: Drawn) -> Wanted:
    """Ask the oracle, row by row."""
    index, qkv = ([x.clone().requires_grad_() for x in some] for some in (case.index, case.qkv))
    sinks = None if case.sinks is None else case.sinks.clone().requires_grad_()
    q, k, v = qkv
    width = v.shape[3]
    choices, outs, lses, sums = [], [], [], [list[torch.Tensor](), list[torch.Tensor]()]
    for row, seen in enumerate(case.seen):
        scores = oracle.scores(*(x[row] for x in index))
        choices.append(oracle.choice(scores, seen, case.topk))
        reads = torch.zeros_like(seen)
        for token, keys in enumerate(choices[-1]):
            reads[token, keys] = True
        values = k[row][..., :width] if case.latent else v[row]
        for at, pairs in enumerate((reads, seen)):
            found = oracle.attention(q[row], k[row], values, pairs, q.shape[3] ** -0.5, sinks)
            sums[at] += oracle.loss_rows(scores, pairs, found.probabilities)[: case.length - case.padding[row]]
            if not at:
                outs.append(found.out)
                lses.append(found.lse)
    losses, out = [torch.stack(rows).mean() for rows in sums], torch.stack(outs)
    given = {"q": q, "k": k} | ({} if case.latent else {"v": v}) | ({} if sinks is None else {"sinks": sinks})
    gradients = dict(zip(given, torch.autograd.grad(out, list(given.values()), case.dout), strict=True))
    for at, loss in enumerate(losses):
        of_loss = torch.autograd.grad(loss, index, retain_graph=True)
        gradients |= zip((f"index_q {at}", f"index_k {at}", f"weights {at}"), of_loss, strict=True)
    return Wanted(choices, out, torch.stack(lses), losses, gradients)


def compare(case: Drawn, rank: int, ranks: int) -> None:
    """Run a case on this rank, and compare with its rows of the oracle's results."""
    rows, want = positions_of(case.layout, rank), wanted(case)
    index, qkv = ([x[:, rows].clone().requires_grad_() for x in some] for some in (case.index, case.qkv))
    q, k, v = qkv
    sinks = None if case.sinks is None else case.sinks.clone().requires_grad_()
    documents = list(case.offsets) if case.per_row else case.offsets[0] if len(case.offsets[0]) > 2 else None
    where: dict[str, Any] = {"layout": case.layout, "cu_seqlens": None if case.masks else documents}
    pairs = where | {"mask": [one.mask for one in case.masks] or None}
    positions = index_topk(*index, case.topk, **pairs)
    got = [[[key for key in keys if key >= 0] for keys in row] for row in positions.tolist()]
    assert got == [[row[token] for token in rows.tolist()] for row in want.choices]
    width = case.qkv[2].shape[3]
    values: dict[str, Any] = {"v": None, "head_dim_v": width} if case.latent else {"v": v}
    out, lse = sparse_attn(q, k, positions=positions, sinks=sinks, return_lse=True, **values, **where)
    close = functools.partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)
    close(out, want.out[:, rows])
    close(lse, want.lse[:, :, rows])
    given = {"q": q, "k": k} | ({} if case.latent else {"v": v}) | ({} if sinks is None else {"sinks": sinks})
    for name, mine in zip(given, torch.autograd.grad(out, list(given.values()), case.dout[:, rows]), strict=True):
        if name == "sinks":
            close(_summed(mine, ranks), want.gradients[name])
        else:
            close(mine, want.gradients[name][:, rows])
    dense = [
        oracle.attention(q, k, v, pairs, q.shape[2] ** -0.5, case.sinks).lse
        for q, k, v, pairs in zip(*case.qkv, case.seen, strict=True)
    ]
    for at, mine in enumerate((lse, torch.stack(dense)[:, :, rows])):
        chosen = None if at else positions
        loss = index_loss(*index, q, k, mine, chosen, valid=case.valid[:, rows], **pairs)
        close(_summed(loss.detach(), ranks), want.losses[at].detach())
        for name, x in zip(("index_q", "index_k", "weights"), torch.autograd.grad(loss, index), strict=True):
            close(x, want.gradients[f"{name} {at}"][:, rows])


def _summed(x: torch.Tensor, ranks: int) -> torch.Tensor:
    total = x.clone()
    if ranks > 1:
        dist.all_reduce(total)
    return total


def compare_many(rank: int, ranks: int, first: int, cases: int) -> int:
    """Compare cases by their numbers; an error names its case. Return how many."""
    for seed in range(first, first + cases):
        try:
            compare(drawn(seed, ranks), rank, ranks)
        except Exception as error:
            raise AssertionError(f"case {seed} of {ranks} ranks, rank {rank}") from error
    return cases
