"""Peak memory: what is alive at once in a long attention, counted on a device that has no memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dfa_megatron.kernels.adapters import flash4, flash4_launches
from dfa_megatron.kernels.adapters.flash4 import Flash4Kernel
from dfa_megatron.kernels.tape import Tape, launched
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.kernel_calls import ANY
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, Transport
from dfa_megatron.runtime.execute import tensors as tensors_module
from dfa_megatron.runtime.execute.bound import Bound, Fields, Recorder
from dfa_megatron.runtime.execute.memory import MemoryPlan, placed
from dfa_megatron.runtime.execute.tensors import Tensors, execute
from dfa_megatron.runtime.request import Request
from tests.support.live_bytes import LiveBytes

RANKS, LENGTH, DIM = 4, 131072, 128
LOCAL = LENGTH // RANKS
MIB = 1 << 20
META = torch.device("meta")
TRANSFORMER_ENGINE = {8: 3.1348, 32: 5.2598}
"""GiB of its p2p by kv heads, measured: benchmarks/results/2026-11-22-4xh200-peers-flash4.json."""


class Launches(dict[str, Any]):
    """Compiled functions that do nothing; `seen` runs with each launch."""

    seen: Callable[[], None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> Any:
        return self.seen_with

    @staticmethod
    def seen_with(*_: Any) -> None:
        Launches.seen()


class Flash4Sized(SimpleNamespace):
    """The module of FlashAttention-4 for Hopper and head_dim 128: it allocates as READ does, and launches nothing."""

    def forward(self, q: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        batch, rows, heads, _dim = q.shape
        return torch.empty_like(q), q.new_empty(batch, heads, rows, dtype=torch.float32)

    def backward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, **given: Any) -> Any:
        dq, dk, dv = (
            torch.empty_like(x) if given.get(n) is None else given[n]
            for n, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
        )
        dq_sum = torch.empty_like(q, dtype=torch.float32)
        dpsum, lse_log2 = (torch.empty_like(lse) for _ in range(2))
        grouped = q.shape[2] != k.shape[2]
        dk_sum, dv_sum = (torch.zeros_like(x, dtype=torch.float32) if grouped else None for x in (k, v))
        main = (dk, dv) if dk_sum is None else (dk_sum, dv_sum)
        self._bwd_preprocess.compile_cache[""](given["out"], given["dout"], dpsum, lse, lse_log2, dq_sum)
        self._flash_attn_bwd.compile_cache[""](q, k, v, given["dout"], lse_log2, dpsum, dq_sum, *main)
        for total, result in ((dq_sum, dq), (dk_sum, dk), (dv_sum, dv)):
            if total is not None:
                self._bwd_postprocess_convert.compile_cache[""](total, result, 1.0)
        return dq, dk, dv


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's memory, and one kernel that merges; PyTorch's operations, elsewhere, have temporaries."""
    module = Flash4Sized(**{name: SimpleNamespace(compile_cache=Launches()) for name in flash4_launches._LAUNCHING})
    monkeypatch.setattr(flash4_launches, "importlib", SimpleNamespace(import_module=lambda _: module))
    monkeypatch.setattr(flash4, "_functions", lambda: (module.forward, module.backward))
    monkeypatch.setattr(flash4, "_version", lambda: flash4.READ)
    for name in ("add", "merge"):
        monkeypatch.setattr(tensors_module, name, lambda *tensors: launched(Launches.seen_with, *tree_leaves(tensors)))


class Holding(Transport):
    """Moves nothing, and holds what a step sends until its messages have landed."""

    sending: Sequence[Send] = ()
    queued = True

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        self.sending = sends(False)

    def land(self) -> None:
        self.sending = ()


def inputs(phase: str, heads: int, kv_heads: int) -> Fields:
    """A rank's own rows, as a phase reads them; the last of a backward is out, which its caller holds."""

    def rows(count: int) -> torch.Tensor:
        return torch.empty(1, LOCAL, count, DIM, dtype=torch.bfloat16, device=META)

    q, k, v = rows(heads), rows(kv_heads), rows(kv_heads)
    if phase == "forward":
        return q, k, v
    lse, minus_delta = (torch.empty(1, heads, LOCAL, device=META) for _ in range(2))
    return q, k, v, rows(heads), lse, minus_delta, rows(heads)


def arena_of(memory: MemoryPlan) -> torch.Tensor:
    return torch.empty(memory.arena_bytes, dtype=torch.uint8, device=META)


def run(
    memory: MemoryPlan, given: Fields, arena: torch.Tensor, transport: Transport, failed: Any = lambda _, error: error
) -> Fields:
    q, k, v, *known = given
    home = {"qdo": (q, *known[:3]), "kv": (k, v)} if known else {"q": (q,), "kv": (k, v)}
    tensors = Tensors(memory, Flash4Kernel(), Request(softmax_scale=1.0, causal=True), home, arena)
    execute(tensors, transport, failed)
    return tensors.result("out") if not known else (*tensors.result("dq"), *tensors.result("dkv"))


def recorded(memory: MemoryPlan, given: Fields, transport: Transport) -> Bound:
    arena = arena_of(memory)
    with Tape((*given, arena)) as tape:
        recorder = Recorder(tape, transport, len(given))
        bound = Bound(recorder, run(memory, given, arena, recorder))
    assert not tape.why_not
    return bound


def peaks(plan: Plan, heads: int, kv_heads: int, *, replayed: bool) -> list[LiveBytes]:
    """What lives on each rank: the phase's inputs, the arena, accumulators, results, and what the kernel takes."""
    form, found = Sizes(1, heads, kv_heads, DIM, DIM, "bfloat16", "delta"), []
    transport = Holding()
    for rank in range(RANKS):
        memory = placed(plan, rank, form, ANY)
        drive: Any = partial(run, memory)
        if replayed:
            drive = recorded(memory, inputs(plan.phase.name, heads, kv_heads), transport)
        with LiveBytes() as live:
            Launches.seen = live.look  # type: ignore[method-assign]
            drive(inputs(plan.phase.name, heads, kv_heads), arena_of(memory), transport, lambda step, error: error)
        found.append(live)
    return found


PEAKS = {
    # Merging, on the last rank: half of q's rows in float32, beside two partials.
    (32, "forward"): {1024: 1, 256: 6, 4: 2, 2: 1},
    (8, "forward"): {388: 1, 256: 4, 64: 2, 4: 2, 2: 1},
    # Merging, on the first rank: q, k, v, dout and out; dq; a sum of dk in float32; three partials of dk and of dv.
    (32, "backward"): {1024: 1, 512: 1, 256: 13, 128: 1, 4: 2},
    # The second kernel call, as it converts dq: q, dout, out, dq and a partial of dq; k, v and a partial of dk and dv;
    # dq in float32 (512), dk and dv (128); lse, -delta and two more of the kernel.
    (8, "backward"): {780: 1, 512: 1, 256: 5, 128: 2, 64: 4, 4: 4},
}
"""How many tensors of each size in MiB there are at the peak, by kv heads; the largest is the arena."""


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_a_long_attention_holds_no_more_at_once_than_its_account_of_every_tensor(kv_heads: int, replayed: bool) -> None:
    plan = make_plan(causal(LENGTH), RANKS, schedule="balanced_shared")
    for phase in (plan.forward, plan.backward):
        account = PEAKS[kv_heads, phase.phase.name]
        together = sum(size * count for size, count in account.items())
        assert together < 1024 * TRANSFORMER_ENGINE[kv_heads]
        highest = max(peaks(phase, 32, kv_heads, replayed=replayed), key=lambda live: live.peak)
        assert highest.peak // MIB <= together
        # Smaller ones are left out.
        found = Counter(size // MIB for size in highest.most if size >= MIB)
        assert replayed or found == account


def test_a_replay_names_the_step_at_which_the_run_as_it_stands_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LOCAL", 64)
    plan = make_plan(causal(64 * RANKS), RANKS, schedule="ring").backward
    form = Sizes(1, 8, 4, DIM, DIM, "bfloat16", "delta")
    memory, transport = placed(plan, RANKS - 1, form, ANY), Holding()
    given, arena = inputs(plan.phase.name, 8, 4), arena_of(memory)
    monkeypatch.setattr(Launches, "seen", lambda: None)
    bound = recorded(memory, given, transport)
    steps = [failing_step(monkeypatch, partial(run, memory, given, arena, transport), at) for at in range(40)]
    assert {0, 1, 2, 3} <= set(steps)
    assert steps == [failing_step(monkeypatch, partial(bound, given, arena, transport), at) for at in range(40)]


def failing_step(patch: pytest.MonkeyPatch, attempt: Callable[[Any], object], at: int) -> int | None:
    """Return the step that is named where the launch of this number raises; None if there is none."""
    numbers, steps = itertools.count(), list[int]()

    def fail() -> None:
        if next(numbers) == at:
            raise RuntimeError("no launch")

    def failed(step: int, error: Exception) -> Exception:
        steps.append(step)
        return error

    patch.setattr(Launches, "seen", fail)
    with suppress(RuntimeError):
        attempt(failed)
    return steps[0] if steps else None
