"""Random attentions, many of them: no wrong answer, and no memory that stays.

    DFA_STRESS=1000 python -m pytest -q -n 12 tests/kernels/test_kernel_stress.py     # 1,000 for each kernel

DFA_STRESS says how many for each kernel and DFA_STRESS_SEED which ones; without the first only the CPU's kernels run.
A part draws lengths, bands, batches, head counts and memory layouts, but keeps what kernels are compiled for.
"""

from __future__ import annotations

import gc
import math
import os
import random
from dataclasses import dataclass, replace

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor import kernel_trial as trial
from dfa_megatron.kernels import BlockCall, BlockKernel, Partial
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from tests.support.kernel_cases import as_layout
from tests.support.support_rows import kernel as of_kernel

ITERATIONS = int(os.environ.get("DFA_STRESS", "0"))
SEED = int(os.environ.get("DFA_STRESS_SEED", "0"))
ON_CPU = 24
LONGEST = 1100

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Part:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    head_dim: int
    group: int
    form: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-d{self.head_dim}-{self.group}:1-{self.form}"


PARTS = [
    Part(BF16, 128, 1, "causal"),
    Part(BF16, 128, 4, "causal"),
    Part(BF16, 128, 1, "full"),
    Part(BF16, 128, 4, "full"),
    Part(BF16, 128, 2, "window"),
    Part(BF16, 64, 1, "window"),
    Part(BF16, 64, 8, "left"),
    Part(BF16, 128, 1, "right"),
    Part(BF16, 256, 1, "causal"),
    Part(BF16, 96, 3, "full"),
    Part(FP16, 64, 1, "causal"),
    Part(FP16, 128, 4, "window"),
    Part(FP32, 64, 2, "causal"),
    Part(FP32, 128, 1, "window"),
]
PARTS_ON_CPU = [*PARTS[::5], *(Part(torch.float64, 8, 2, form) for form in ("causal", "window", "left", "right"))]


def length(rng: random.Random, longest: int) -> int:
    """As often short as long."""
    return round(math.exp(rng.uniform(0.0, math.log(longest))))


def drawn(part: Part, rng: random.Random, device: str, longest: int) -> trial.Trial:
    q_len, kv_len = length(rng, longest), length(rng, longest)
    if part.form == "causal" and rng.random() < 0.7:
        kv_len = q_len
    reach = [rng.randrange(max(q_len, kv_len)) for _ in range(2)]
    bands = {
        "full": FULL, "causal": CAUSAL, "window": Band(*reach), "left": Band(reach[0], -1), "right": Band(-1, reach[1]),
    }  # fmt: skip
    kv_heads = rng.randint(1, 3 if part.group < 4 else 1)
    return trial.Trial(
        q_len=q_len, kv_len=kv_len, band=bands[part.form], heads=kv_heads * part.group, kv_heads=kv_heads,
        head_dim=part.head_dim, head_dim_v=part.head_dim, dtype=part.dtype, device=device, batch=rng.randint(1, 2),
    )  # fmt: skip


class Relaid(trial.Trial):
    """A trial whose inputs lie in memory in drawn orders."""

    def inputs(self, seed: int = 0) -> trial.Inputs:
        layouts = random.Random(seed).choices(["bhsd", "sbhd", "rows of longer", ""], k=4)
        return tuple(as_layout(x, way) if way else x for x, way in zip(super().inputs(seed), layouts, strict=True))


def stress(kernel: BlockKernel, part: Part, device: str, iterations: int, longest: int) -> int:
    """How many of the drawn attentions the kernel took.

    Three times the conformance suite's limits, and more on a few tokens, whose few rounding errors do not average out:
    what is wrong is wrong by far more.
    """
    rng = random.Random(f"{SEED} {kernel.name} {part}")
    taken, kept = 0, 0
    for iteration in range(iterations):
        drawing = drawn(part, rng, device, longest)
        if kernel.refusal(drawing.need()) is not None:
            continue
        block = Relaid(**{name: getattr(drawing, name) for name in trial.Trial.__dataclass_fields__})
        found = trial.errors(kernel, block, seed=rng.randrange(1 << 30))
        slack = 3.0 if min(block.q_len, block.kv_len) >= 16 else 20.0
        bad = trial.wrong({name: error / slack for name, error in found.items()}, part.dtype)
        assert not bad, f"iteration {iteration} of seed {SEED}: {bad} of {found} for {drawing}"
        taken += 1
        if device == "cuda" and taken == 4:  # by now libraries have their workspaces
            gc.collect()
            kept = torch.cuda.memory_allocated()
    if taken > 4 and device == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        grown = torch.cuda.memory_allocated() - kept
        assert grown <= 1 << 20, f"{grown} bytes stayed after {taken} attentions"
    return taken


@pytest.mark.parametrize("part", PARTS_ON_CPU, ids=str)
@pytest.mark.parametrize("name", ["triton"] if interpreted() else ["cpu", "reference"])
def test_random_attentions_are_right_on_a_cpu(name: str, part: Part) -> None:
    assert stress(kernels.get(name), part, "cpu", 3 if interpreted() else ON_CPU, 64) > 0


class OneTooWide(ReferenceKernel):
    """Sees one key more on the left."""

    def forward(self, call: BlockCall) -> Partial:
        whole = call.segments
        wide = Segments.one(replace(whole.band, left=whole.band.left + 1), whole.q_len, whole.kv_len)
        return super().forward(replace(call, segments=wide))


def test_a_kernel_whose_window_is_one_too_wide_is_found() -> None:
    with pytest.raises(AssertionError, match="iteration"):
        stress(OneTooWide(), PARTS[5], "cpu", 10, 64)


@pytest.mark.support("kernels", "random attentions (`DFA_STRESS`)", of_kernel)
@pytest.mark.gpu
@pytest.mark.skipif(ITERATIONS == 0, reason="DFA_STRESS does not say how many attentions to try")
@pytest.mark.timeout(580)
@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if name not in ("cpu", "reference")])
def test_random_attentions_are_right_and_leave_no_memory_behind(name: str, part: Part) -> None:
    kernel = kernels.get(name)
    everything = drawn(part, random.Random(0), "cuda", LONGEST)
    taken = stress(kernel, part, "cuda", -(-ITERATIONS // len(PARTS)), LONGEST)
    if not taken:
        pytest.skip(f"{name}: {kernel.refusal(everything.need()) or 'it refuses every one of the part'}")
