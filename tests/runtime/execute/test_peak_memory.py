"""Peak memory: what is alive at once in a long attention's backward, counted on a device that has no memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfa_megatron.kernels.adapters import flash4
from dfa_megatron.kernels.adapters.flash4 import Flash4Kernel
from dfa_megatron.plan.interpret import rank_loop
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.proof.check import check
from dfa_megatron.plan.schedules import plan_named
from dfa_megatron.runtime.comm.arena import Arena
from dfa_megatron.runtime.execute import accumulators
from dfa_megatron.runtime.execute.memory_plan import plan_memory
from dfa_megatron.runtime.execute.tensors import Tensors
from dfa_megatron.runtime.execute.wire_format import Format

RANKS, LENGTH, DIM = 4, 131072, 128
LOCAL = LENGTH // RANKS
MIB = 1 << 20


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have returned and somebody still holds, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in self.sizes:
                storage = x.untyped_storage()
                self.sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, id(storage))
        self.peak = max(self.peak, sum(self.sizes.values()))
        return results


class Flash4Sized:
    """The functions of FlashAttention-4 on Hopper for head_dim 128: they allocate what it does, and compute nothing."""

    @staticmethod
    def forward(q: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        batch, rows, heads, _dim = q.shape
        return torch.empty_like(q), q.new_empty(batch, heads, rows, dtype=torch.float32)

    @staticmethod
    def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, **given: Any) -> Any:
        dq, dk, dv = (
            torch.empty_like(x) if given.get(n) is None else given[n]
            for n, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
        )
        statistics = [torch.empty_like(lse) for _ in range(2)]
        in_float32 = [q] if q.shape[2] == k.shape[2] else [q, k, v]
        workspaces = [torch.empty_like(x, dtype=torch.float32) for x in in_float32]
        del statistics, workspaces
        return dq, dk, dv


def inputs(phase: str, heads: int, kv_heads: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """A rank's own rows, as a phase reads them."""

    def rows(count: int) -> torch.Tensor:
        return torch.empty(1, LOCAL, count, DIM, dtype=torch.bfloat16, device="meta")

    kv = rows(kv_heads), rows(kv_heads)
    if phase == "forward":
        return {"q": (rows(heads),), "kv": kv}
    lse, delta = (torch.empty(1, heads, LOCAL, device="meta") for _ in range(2))
    return {"qdo": (rows(heads), rows(heads), lse, delta), "kv": kv}


def peak(plan: Plan, heads: int, kv_heads: int) -> list[int]:
    """MiB of each rank: the phase's inputs, the arena, accumulators, results, and what the kernel takes."""
    form = Format(1, heads, kv_heads, DIM, DIM, torch.bfloat16, torch.bfloat16, "delta")
    programs, peaks = check(plan), []
    for rank in range(RANKS):
        memory = plan_memory(programs, rank, form)
        with Live() as live:
            arena = Arena.allocate(memory.arena_bytes, torch.device("meta"))
            own = inputs(plan.phase.name, heads, kv_heads)
            tensors = Tensors(memory, Flash4Kernel(), own, arena, softmax_scale=1.0, deterministic=False)
            sending: list[list[torch.Tensor]] = []
            for kind, _, step in rank_loop(memory.program, tensors):
                sending = [tensors.outgoing(message) for message in step.sends] if kind == "post" else []
            assert not sending
        peaks.append(-(-live.peak // MIB))
        del tensors, arena
    return peaks


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's memory, and one kernel that merges; PyTorch's operations, elsewhere, have temporaries."""
    monkeypatch.setattr(flash4, "_functions", lambda: (Flash4Sized.forward, Flash4Sized.backward))
    for name in ("add", "merge"):
        monkeypatch.setattr(accumulators, name, lambda *_: None)


@pytest.mark.parametrize(("heads", "kv_heads", "forward", "backward"), [(32, 32, 2570, 4745), (32, 8, 1550, 2981)])
def test_a_long_attention_holds_no_more_at_once_than_was_worked_out(
    heads: int, kv_heads: int, forward: int, backward: int
) -> None:
    """MiB, for 128K tokens on four ranks; a tensor of 32 heads is 256 and one of 8 is 64, a statistic of 32 heads 4.

    Backward of 32 kv heads, on rank 0 as it merges the first dkv that lands: inputs of 1032, an arena of 1024, two dq
    that are done or leave and half a dq, three partials of dk and dv each, a sum of dk alone in float32, and one row of
    zeros. Of 8: in the second call of a kernel, inputs of 648, an arena of 780, one partial of dq, dk and dv each,
    statistics that leave, and the call's own 1164, of which 768 are its accumulators in float32.
    """
    plan = plan_named("balanced_shared", causal(LENGTH), RANKS)
    assert max(peak(plan.forward, heads, kv_heads)) <= forward
    assert max(peak(plan.backward, heads, kv_heads)) <= backward
