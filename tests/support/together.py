"""Run all ranks of a distributed attention in one process: the same plan, kernels and wire format, no network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.plan.interpret import run_together
from dfa_megatron.runtime.comm.transport import Arena
from dfa_megatron.runtime.prepare import Prepared, build
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.rank_plan import MemoryPlan
from dfa_megatron.runtime.request import Request
from dfa_megatron.runtime.run import backward_algebra, forward_algebra, needed_by_backward

Shards = Sequence[torch.Tensor]


def prepare_together(request: Request, q: Shards, k: Shards, v: Shards) -> list[Prepared]:
    """Prepare every rank; shard r holds the tokens of rank r."""
    return [build(request, len(q), rank, Inputs(q[rank], k[rank], v[rank])) for rank in range(len(q))]


@torch.no_grad()
def forward_together(
    prepared: Sequence[Prepared], q: Shards, k: Shards, v: Shards, slopes: torch.Tensor | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (out, lse) of every rank."""
    algebras = [
        forward_algebra(p, (q[rank], k[rank], v[rank], *_given(slopes)), _arena(p.forward, q))
        for rank, p in enumerate(prepared)
    ]
    run_together([p.forward.program for p in prepared], algebras)
    return [(out, lse) for out, lse in (algebra.result("out") for algebra in algebras)]


@torch.no_grad()
def backward_together(
    prepared: Sequence[Prepared],
    dout: Shards,
    q: Shards,
    k: Shards,
    v: Shards,
    out: Shards,
    lse: Shards,
    slopes: torch.Tensor | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return (dq, dk, dv) of every rank."""
    algebras = [
        backward_algebra(
            p, (dout[rank], q[rank], k[rank], v[rank], needed, lse[rank], *_given(slopes)), _arena(p.backward, q)
        )
        for rank, p in enumerate(prepared)
        for needed in (needed_by_backward(p, dout[rank], out[rank]),)
    ]
    run_together([p.backward.program for p in prepared], algebras)
    return [(*algebra.result("dq"), *algebra.result("dkv")) for algebra in algebras]  # type: ignore[misc]


def both_together(
    prepared: Sequence[Prepared], q: Shards, k: Shards, v: Shards, dout: Shards, slopes: torch.Tensor | None = None
) -> tuple[Shards, Shards, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Return out and lse of every rank, and (dq, dk, dv) of each."""
    out, lse = zip(*forward_together(prepared, q, k, v, slopes), strict=True)
    return out, lse, backward_together(prepared, dout, q, k, v, out, lse, slopes)


def _given(slopes: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if slopes is None else (slopes,)


def _arena(memory: MemoryPlan, q: Shards) -> Arena:
    return Arena.allocate(memory.arena_bytes, q[0].device)
