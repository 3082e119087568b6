"""MagiAttention: chunks of tokens dispatched by its planner, flex-flash-attention, and its group collectives on NCCL.

Its key is planned and tokens are dispatched before the clock, and its overlap is set, as in its own benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import need_gpus
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError

PACKAGE = "magi_attention"
CHUNKS = (2048, 512)  # tokens at most: chunks are shorter where a rank would have less than 8


def methods(job: Job) -> list[Method]:
    """Return one causal method per size of a chunk.

    Raises:
        UnsupportedError: it is not installed, or not on GPUs.
    """
    need_gpus(PACKAGE, job.device)
    return [_with_chunks(chunk, None, causal=True) for chunk in CHUNKS]


def pack_methods(shapes: Any, offsets: Sequence[int], world: World) -> list[Method]:
    """Return the same over documents, whose tokens have no batch."""
    need_gpus(PACKAGE, world.device.type)
    return [_with_chunks(chunk, offsets, causal=shapes.causal) for chunk in CHUNKS]


def _with_chunks(chunk: int, offsets: Sequence[int] | None, *, causal: bool) -> Method:
    keys: list[Any] = []

    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        if problem.causal != causal:
            raise UnsupportedError("MagiAttention with a full mask", "its tokens are split causally", "a causal mask")
        sizes = problem.heads, problem.kv_heads, problem.head_dim
        package, key = _planned(offsets or (0, local_seq * world.size), chunk, sizes, causal)
        keys.append(key)
        return lambda q, k, v: package.calc_attn(*(x.flatten(0, -3) for x in (q, k, v)), key)[0].view(q.shape)

    def split(x: torch.Tensor, world: World) -> torch.Tensor:
        heads, head_dim = x.shape[2:]  # they do not decide where a token goes
        package, key = _planned(offsets or (0, x.shape[1]), chunk, (heads, heads, head_dim), causal)
        mine: torch.Tensor = package.dispatch(x[0], key)
        return mine[None] if offsets is None else mine

    note, took = "planned and dispatched before the clock", lambda: f"chunks of {keys[-1].chunk_size}"
    return Method(f"magi {chunk}", "baseline", start, split, note, took=took)


def _planned(offsets: Sequence[int], chunk: int, sizes: tuple[int, ...], causal: bool) -> tuple[Any, Any]:
    from magi_attention import api, config

    costs = config.UniformOverlapAlg(random_costs=True, random_seed=42)
    overlap = config.OverlapConfig(degree=2, min_chunk_size=512, max_num_chunks=4096, alg=costs)
    options = config.DistAttnConfig(config.DispatchConfig(chunk_size=chunk), overlap)
    ends = torch.tensor(offsets, dtype=torch.int32)
    key = api.magi_attn_varlen_key(ends, ends, *sizes, 0, dist.group.WORLD, causal, dist_attn_config=options)
    if key.pad_size:
        raise UnsupportedError(f"{offsets[-1]} tokens", f"it pads them by {key.pad_size}", "whole chunks on every rank")
    return api, key
