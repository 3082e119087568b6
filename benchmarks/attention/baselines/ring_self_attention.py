"""Ring Self-Attention (Li et al. 2021, arXiv 2105.13120): keys go around for all scores of a rank's rows, then values.

Its softmax is over whole rows, so a rank holds heads * tokens^2 / ranks scores. It knows no causal mask: scores of
later tokens are computed and then hidden. Here a part travels while the one before is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return the one method."""
    return [Method("ring_self_attention", "baseline", _start, note="holds all scores of a rank's rows")]


def _start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
    if problem.kv_heads != problem.heads:
        raise UnsupportedError(
            f"Ring Self-Attention of {problem.heads} heads on {problem.kv_heads}",
            "it has keys and values for each head",
            "as many kv_heads as heads",
        )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
        out: torch.Tensor = _RingSelfAttention.apply(*heads_first, problem.causal)  # type: ignore[no-untyped-call]
        return out.unflatten(0, (len(q), -1)).transpose(1, 2)

    return attend


class _RingSelfAttention(torch.autograd.Function):
    """q, k and v are (batch * heads, local_seq, dim)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        rows, rank = q.shape[1], dist.get_rank()
        scores = q.new_empty(len(q), rows, dist.get_world_size() * rows)
        for owner, part in _around(k):
            block = scores.narrow(2, owner * rows, rows)
            block.baddbmm_(q, part.mT, beta=0, alpha=q.shape[-1] ** -0.5)
            if causal and owner == rank:
                block.masked_fill_(torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
            elif causal and owner > rank:
                block.fill_(-torch.inf)
        shares = scores.softmax(-1)
        del scores
        out = torch.zeros_like(q)
        for owner, part in _around(v):
            out.baddbmm_(shares.narrow(2, owner * rows, rows), part)
        ctx.save_for_backward(q, k, v, shares, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, shares, out = ctx.saved_tensors
        rows, scale, dout = q.shape[1], q.shape[-1] ** -0.5, dout.contiguous()
        gradient = torch.empty_like(shares)
        dk, dv = (k.new_empty(dist.get_world_size(), *k.shape) for _ in range(2))
        for owner, part in _around(v):
            gradient.narrow(2, owner * rows, rows).baddbmm_(dout, part.mT, beta=0)
            dv[owner].baddbmm_(shares.narrow(2, owner * rows, rows).mT, dout, beta=0)
        gradient.sub_((dout * out).sum(-1, keepdim=True)).mul_(shares)
        dq = torch.zeros_like(q)
        for owner, part in _around(k):
            block = gradient.narrow(2, owner * rows, rows)
            dq.baddbmm_(block, part, alpha=scale)
            dk[owner].baddbmm_(block.mT, q, beta=0, alpha=scale)
        return dq, _own_sum(dk), _own_sum(dv), None


def _around(part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its part) of every rank, one's own first; the next part arrives meanwhile."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks):
        following, requests = torch.empty_like(part), list[Any]()
        if step + 1 < ranks:
            there = dist.P2POp(dist.isend, part, (rank - 1) % ranks)
            here = dist.P2POp(dist.irecv, following, (rank + 1) % ranks)
            requests = dist.batch_isend_irecv([there, here])
        yield (rank + step) % ranks, part
        for request in requests:
            request.wait()
        part = following


def _own_sum(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of this rank's part of (ranks, ...)."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.sum(0)
