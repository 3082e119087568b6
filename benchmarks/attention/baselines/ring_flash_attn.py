"""ring-flash-attn: its ring, its zigzag ring and its Llama-3 all-gather, on FlashAttention-2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import version_of
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, zigzag
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return one method per algorithm of the package.

    Raises:
        UnsupportedError: it is not installed, or flash-attn is not.
    """
    version_of("ring-flash-attn")
    version_of("flash-attn")
    return [
        Method("ring-flash-attn ring", "baseline", _ring),
        Method("ring-flash-attn zigzag", "baseline", _zigzag, zigzag),
        Method("ring-flash-attn llama3", "baseline", _llama3),
    ]


@functools.cache
def _package() -> ModuleType:
    # Its adapters for Hugging Face want names that only some versions of transformers have, and serve nothing here.
    adapters: Any = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault(adapters.__name__, adapters)
    import ring_flash_attn

    package: ModuleType = ring_flash_attn
    return package


def _ring(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
    return functools.partial(_package().ring_flash_attn_func, causal=problem.causal)


def _zigzag(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
    if not problem.causal:
        raise UnsupportedError("zigzag of a full mask", "the package asserts causal=True", "its ring")
    return functools.partial(_package().zigzag_ring_flash_attn_func, causal=True)


def _llama3(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
    attend = llama3_varlen((0, world.size * local_seq), problem.kv_heads, problem.causal, world)
    return lambda q, k, v: attend(q[0], k[0], v[0])[None]


def llama3_varlen(offsets: Sequence[int], kv_heads: int, causal: bool, world: World) -> Attention:
    """Return its Llama-3 all-gather over documents, of (local tokens, heads, head_dim)."""
    package = _package()
    whole = torch.tensor(offsets, dtype=torch.int32, device=world.device)
    *prepared, local_k_slice = package.llama3_flash_attn_prepare_cu_seqlens(whole, causal, world.rank, world.size)
    stride = max(count for count in (1, 2, 3, 4) if kv_heads % count == 0)  # 4 in the package's own benchmark
    options = {"heads_k_stride": stride, "local_k_slice": local_k_slice, "causal": causal, "group": dist.group.WORLD}
    return lambda q, k, v: package.llama3_flash_attn_varlen_func(q, k, v, *prepared, **options)
