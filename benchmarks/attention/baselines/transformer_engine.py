"""TransformerEngine's context parallelism, Megatron-Core's own: p2p ring, all-gather, all-to-all, and both nested."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import need_gpus
from benchmarks.attention.baselines.ulysses import refuse_heads
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, zigzag
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return one method per cp_comm_type; TransformerEngine chooses its kernel (NVTE_FUSED_ATTN, NVTE_FLASH_ATTN).

    Raises:
        UnsupportedError: it is not installed, or not on GPUs.
    """
    need_gpus("transformer-engine", job.device)
    return [_communicating(kind) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p")]


def context_parallel(sizes: Any, kind: str, world: World, form: str, mask: str) -> Any:
    """Return Transformer Engine's attention over the ranks, by its cp_comm_type, qkv_format and attn_mask_type.

    sizes: with heads, kv_heads and head_dim.
    """
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        sizes.heads,
        sizes.head_dim,
        num_gqa_groups=sizes.kv_heads,
        attention_dropout=0.0,
        qkv_format=form,
        attn_mask_type=mask,
    )
    group, stream = communicators(kind, world)
    attention.set_context_parallel_group(group, list(range(world.size)), stream, kind)
    return attention


def _communicating(kind: str) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        if kind == "a2a+p2p" and (world.size % 2 or world.size == 2):
            raise UnsupportedError(f"a2a+p2p over {world.size} ranks", "pairs in a ring take 4, 6, ...", "p2p or a2a")
        refuse_heads(problem, {"a2a": world.size, "a2a+p2p": 2}.get(kind, 1))
        attention = context_parallel(problem, kind, world, "bshd", "causal" if problem.causal else "no_mask")
        return lambda q, k, v: attention(q, k, v).view(q.shape)

    return Method(f"transformer_engine {kind}", "baseline", start, zigzag)


@functools.cache
def communicators(kind: str, world: World) -> tuple[Any, torch.cuda.Stream]:
    """Return its group, or for a2a+p2p the pair's and the ring's, and the second stream of its ring."""
    stream = torch.cuda.Stream()
    if kind != "a2a+p2p":
        return dist.new_group(backend="nccl"), stream
    pairs = [list(range(first, first + 2)) for first in range(0, world.size, 2)]
    rings = [list(range(first, world.size, 2)) for first in range(2)]
    made = [(ranks, dist.new_group(ranks, backend="nccl")) for ranks in (*pairs, *rings)]
    return [group for ranks, group in made if world.rank in ranks], stream
