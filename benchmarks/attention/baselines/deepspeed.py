"""DeepSpeed's Ulysses: its DistributedAttention around one of our block kernels, as it wraps any local attention."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from benchmarks.attention.baselines import version_of
from benchmarks.attention.baselines.ulysses import refuse_heads
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, local_attention
from dfa_megatron.doctor.world import World


def methods(job: Job) -> list[Method]:
    """Return one method per kernel of the job.

    Raises:
        UnsupportedError: it is not installed.
    """
    version_of("deepspeed")
    return [_with_kernel(kernel) for kernel in job.kernel]


def _with_kernel(kernel: str) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        refuse_heads(problem, world.size)
        from deepspeed.sequence.layer import DistributedAttention

        join_deepspeed(world)
        local = local_attention(kernel, problem, world.device, share=world.size)
        ulysses = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: ulysses(q, k, v, 0)

    return Method(
        f"deepspeed ulysses {kernel}", "baseline", start, note="DistributedAttention around this block kernel"
    )


def join_deepspeed(world: World) -> None:
    """Let DeepSpeed use the ranks that have been joined."""
    import deepspeed

    if not world.cuda:  # otherwise it compiles an extension first, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("nccl" if world.cuda else "gloo", auto_mpi_discovery=False)


def register_ulysses(model: Any, attention: str, ranks: int) -> None:
    """Give a transformers model DeepSpeed's Ulysses (ALST) around an attention that transformers knows by that name."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    # The groups of a process are made once; here for every case.
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
    UlyssesSPAttentionHF.register_with_transformers(model, attention, sequence_parallel_size=ranks, micro_batch_size=1)
