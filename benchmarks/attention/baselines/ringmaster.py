"""axolotl-ringmaster: its "distflash", the other implementation of this method, around one of our block kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.attention.baselines import version_of
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, local_kernel, saved_for
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import BlockCall, BlockKernel
from dfa_megatron.plan.language.geometry import CAUSAL, FULL

Tensor = torch.Tensor


def methods(job: Job) -> list[Method]:
    """Return one method per kernel of the job.

    Raises:
        UnsupportedError: it is not installed.
    """
    version_of("axolotl-ringmaster")
    return [_with_kernel(kernel) for kernel in job.kernel]


def _with_kernel(kernel: str) -> Method:
    blocks: dict[str, Any] = {}

    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        if not problem.causal:
            raise UnsupportedError("ringmaster's distflash with a full mask", "its schedule is causal", "a causal mask")
        from ringmaster.ring.distflash import distflash_attention

        blocks.update(_blocks(local_kernel(kernel, problem, world.device, both=True)))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out: Tensor = distflash_attention(*heads_first, group=dist.group.WORLD, scaling=None)
            return out

        return attend

    def around() -> AbstractContextManager[object]:
        return mock.patch.multiple("ringmaster.ring.distflash", **blocks)

    return Method(f"ringmaster {kernel}", "baseline", start, note="distflash on this block kernel", around=around)


def _blocks(kernel: BlockKernel) -> dict[str, Any]:
    """Return its functions of a block, which know FlashAttention-2 alone, with a kernel of ours."""

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, flash: bool) -> tuple[Tensor, Tensor]:
        return kernel.forward(BlockCall.of(q, k, v, CAUSAL if causal else FULL, scale))

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool, *_: Any,
        **into: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        call = BlockCall.of(q, k, v, CAUSAL if causal else FULL, scale, into=tuple(into.values()))
        return tuple(x.to(q.dtype) for x in kernel.backward(call, dout, saved_for(kernel, dout, out, lse)))

    # It would look for FlashAttention-2 on the hub.
    return {"_block_fwd": forward, "_block_bwd": backward, "_flash_ops": lambda: None}
