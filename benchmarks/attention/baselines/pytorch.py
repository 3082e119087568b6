"""PyTorch's context_parallel with its cuDNN attention: all-gather or all-to-all of key/value chunks, zigzag tokens."""

from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, zigzag
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError


def methods(job: Job) -> list[Method]:
    """Return one method per way to move the chunks.

    Raises:
        UnsupportedError: not on GPUs.
    """
    if job.device != "cuda":
        raise UnsupportedError("context_parallel on a CPU", "it splits PyTorch's CUDA attentions only", "GPUs")
    return [_rotating(method) for method in ("allgather", "alltoall")]


def _rotating(rotate: str) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel, set_rotate_method

        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
        balanced = _cp_options.enable_load_balance
        stack.callback(setattr, _cp_options, "enable_load_balance", balanced)
        _cp_options.enable_load_balance = problem.mask == "causal"  # it balances nothing else
        # The context wants something to split, and patches F.scaled_dot_product_attention until the cell is done.
        unused = torch.zeros(1, 2 * world.size, device=world.device)
        stack.enter_context(context_parallel(mesh, buffers=[unused], buffer_seq_dims=[1]))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            set_rotate_method(rotate)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            grouped = problem.kv_heads != problem.heads
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)
            return out.transpose(1, 2)

        return attend

    return Method(f"pytorch {rotate}", "baseline", start, zigzag, "torch context_parallel, cuDNN")
