"""yunchang (USP): an all-to-all over some ranks and a zigzag ring over the others, on FlashAttention-2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import version_of
from benchmarks.attention.baselines.ulysses import refuse_heads
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, zigzag
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return three methods: all ranks in a ring, pairs that exchange heads in a ring, and all exchange heads.

    Raises:
        UnsupportedError: it is not installed, or flash-attn is not.
    """
    version_of("yunchang")
    version_of("flash-attn")
    return [
        _usp("ring", lambda ranks: 1),
        _usp("2 x ring", lambda ranks: 2),
        _usp("ulysses", lambda ranks: ranks),
    ]


def _usp(name: str, ulysses: Callable[[int], int]) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        degree = ulysses(world.size)
        if name == "2 x ring" and (world.size % 2 or world.size == 2):
            raise UnsupportedError(f"pairs in a ring of {world.size} ranks", "it takes 4, 6, 8, ...", "yunchang ring")
        if degree < world.size and not problem.causal:
            raise UnsupportedError("a zigzag ring of a full mask", "the package asserts causal", "yunchang ulysses")
        refuse_heads(problem, degree)
        return functools.partial(_module(degree, world), causal=problem.causal)

    def split(x: torch.Tensor, world: World) -> torch.Tensor:
        return zigzag(x, world, ulysses(world.size))

    return Method(f"yunchang {name}", "baseline", start, split)


@functools.cache
def _module(degree: int, world: World) -> Any:
    """Make its groups, collective, once."""
    import yunchang

    if degree == world.size:  # a ring of one would send to itself
        return yunchang.UlyssesAttention(dist.group.WORLD)
    yunchang.set_seq_parallel_pg(degree, world.size // degree, world.rank, world.size)
    return yunchang.LongContextAttention(ring_impl_type="zigzag")
