"""A recorded program replays exactly: other values, layouts and packs, over gloo. It names the step that fails.

A new pack is recorded in its first run where another has run.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dfa_megatron
from dfa_megatron import kernels, masks, names
from dfa_megatron.errors import ExecutionError
from dfa_megatron.kernels import BlockCall, Partial, Saved
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.kernels.tape import launched, unrecorded
from dfa_megatron.runtime import run
from dfa_megatron.runtime.comm import transports
from dfa_megatron.runtime.comm.transports import GlooTransport
from dfa_megatron.runtime.execute import tensors as program
from dfa_megatron.runtime.execute.bound import Bound
from dfa_megatron.runtime.prepare import Prepared, in_use
from tests.fuzz.attempt import Listens
from tests.support import attend
from tests.support.arguments import arguments
from tests.support.copying_gloo import CopyingGloo
from tests.support.workers import over_ranks

LOCAL = 12


def compare(rank: int, ranks: int, seed: int, *, local: int = LOCAL, first: str = "", **options: Any) -> None:
    """Forward and backward of fresh random inputs against dense float64."""
    attend.compare(attend.case(ranks * local, seed=seed, first_in_memory=first), rank, ranks, **options)


def recorded(prepared: Prepared) -> int:
    """How many runs of it are replayed from now on."""
    return sum(isinstance(found, Bound) for found in prepared.bound.values())


def _again(rank: int, ranks: int, **options: Any) -> None:
    run._HAVE_RUN.clear()
    for known in in_use():  # of other tests
        known.bound.clear()
    for seed in range(4):
        compare(rank, ranks, seed, **options)
        assert recorded(in_use()[-1]) == (2 if seed else 0), "the second run is recorded, forward and backward"
    for seed in range(4, 7):
        compare(rank, ranks, seed, first="heads", **options)
    assert recorded(in_use()[-1]) == 4, "another layout of the caller's tensors has a recording of its own"
    compare(rank, ranks, 7, **options)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_replays_on_one_rank_are_exact(kernel: str) -> None:
    _again(0, 1, group="", kernel=kernel)


@over_ranks(2, 3)
def test_replays_over_gloo_are_exact_in_every_schedule(rank: int, ranks: int) -> None:
    two = ({"schedule": "ring"}, {"schedule": "balanced_shared", "kernel": "reference"})
    for options in two if ranks == 2 else ({"schedule": "greedy"}, {"layout": "zigzag"}):
        _again(rank, ranks, **options)


@over_ranks(3)
def test_replays_are_exact_in_memory_that_stays_and_after_it_has_moved(rank: int, ranks: int) -> None:
    """Replays in memory that stays, and then in other memory."""
    arenas: list[torch.Tensor] = []

    def arena(self: GlooTransport, nbytes: int, device: torch.device) -> torch.Tensor:
        if not arenas or seed == 6:
            arenas.append(torch.empty(1 << 20, dtype=torch.uint8, device=device))
        return arenas[-1]

    GlooTransport.arena = arena  # type: ignore[method-assign]
    for seed in range(9):
        compare(rank, ranks, seed, schedule="balanced_shared")
        assert arenas[-1].fill_(255).numel()


class Launching(ReferenceKernel):
    """Hands its launches to the tape, and fills memory of the call, as kernels of other libraries do."""

    writes_into = True

    def launch(self, call: BlockCall) -> Partial:
        out = torch.empty_like(call.q) if call.into in ((), (None,)) else call.into[0]
        lse = torch.empty_like(call.q[..., 0].transpose(1, 2))

        def run_it(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *into: torch.Tensor) -> None:
            with unrecorded():
                for memory, found in zip(into, ReferenceKernel.launch(self, replace(call, q=q, k=k, v=v)), strict=True):
                    memory.copy_(found)

        launched(run_it, call.q, call.k, call.v, out, lse)
        return out, lse


@pytest.mark.parametrize(("ranks", "copied"), [(2, False), (3, True)])
@over_ranks()
def test_replays_of_packs_are_exact(rank: int, ranks: int, copied: bool) -> None:
    """Packs whose messages and launches are of the same rows of keys. copied: as they lie, after the first launches."""
    rng, tokens = random.Random(ranks), LOCAL * ranks
    if copied:
        patch.object(transports, "GlooTransport", CopyingGloo).start()
    with patch.object(kernels, "KERNELS", {**kernels.KERNELS, "reference": Launching()}):
        for number in range(6):
            cuts = sorted(rng.sample(range(1, tokens), 3))
            mask = masks.documents([hi - lo for lo, hi in pairwise((0, *cuts, tokens))])
            for seed in range(3):
                whole = attend.case(tokens, seed=seed, mask=mask, batch=1 + number // 3, dtype=torch.float32)
                asked = {"schedule": ("ring", "greedy")[number % 2]} if number % 3 else {"layout": "load_balanced"}
                attend.compare(whole, rank, ranks, kernel="reference", **asked)


def _counted(rank: int, ranks: int) -> tuple[int, int]:
    """Python calls inside the package, and its files that are entered, by a warm forward and backward."""
    shard = [torch.randn(1, LOCAL, h, 16, requires_grad=True) for h in (4, 4, 4)]
    package, entered, calls = os.path.dirname(dfa_megatron.__file__), set(), 0

    def both() -> None:
        dfa_megatron.dist_flash_attn_func(*shard, causal=True).sum().backward()

    def see(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code.co_filename)
            calls += 1

    run.COUNTERS.reset()  # of which the third call is timed
    for _ in range(3):
        both()
    sys.setprofile(see)
    both()
    sys.setprofile(None)
    return calls, len(entered)


@over_ranks(4)
def test_a_warm_call_on_four_ranks_makes_few_calls_of_python(rank: int, ranks: int) -> None:
    assert _counted(rank, ranks)[0] <= 120


def test_a_warm_call_on_one_rank_enters_twelve_files() -> None:
    calls, files = _counted(0, 1)
    assert files <= 12
    assert calls <= 60


def test_a_kernel_that_reads_a_value_back_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, LOCAL, 2, 16)
    real = ReferenceKernel.launch
    monkeypatch.setattr(ReferenceKernel, "launch", lambda self, call: (call.q.sum().item(), real(self, call))[1])
    for _ in range(4):
        dfa_megatron.dist_flash_attn_func(x, x, x, **arguments(causal=True, group="", kernel="reference"))
    (why,) = in_use()[-1].bound.values()
    assert isinstance(why, str)
    assert "reads a value back" in why


def test_more_layouts_of_the_callers_tensors_than_are_kept_run_as_they_stand(caplog: pytest.LogCaptureFixture) -> None:
    names.say_once.cache_clear()
    q, k, v = (torch.randn(1, LOCAL, 2, 16, dtype=torch.float64) for _ in range(3))
    want = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(group="", kernel="cpu"))
    with caplog.at_level("INFO"):
        for more in range(1, run._MOST_BOUND + 3):
            wider = torch.cat([k, k.new_zeros(1, LOCAL, 2, more)], 3)[..., :16]
            out = dfa_megatron.dist_flash_attn_func(q, wider, v, **arguments(group="", kernel="cpu"))
            assert torch.equal(out, want)
    assert len(in_use()[-1].bound) == run._MOST_BOUND
    assert caplog.text.count("the others are not replayed") == 1


class Zeros(Listens):
    """Notes the shapes of the zeros that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, *rest: Any) -> Any:
        result = super().__torch_dispatch__(function, *rest)
        if "zero" in str(function):
            self.shapes.append(tuple(result.shape))
        return result


class Stop(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("by", [nullcontext, Zeros])
def test_a_backward_makes_zeros_only_of_a_missing_gradient_of_out(by: Any) -> None:
    """Of plain calls, and of the operator, which is called where a mode listens."""
    x = torch.randn(1, LOCAL, 2, 16, requires_grad=True)
    for after in (torch.Tensor.clone, Stop.apply):
        with by():
            out = dfa_megatron.dist_flash_attn_func(x, x, x, **arguments(causal=True, group="", kernel="reference"))
            loss = after(out).sum()
        with Zeros() as made:
            (found,) = torch.autograd.grad(loss, x)
        assert found.any() == (after is torch.Tensor.clone)
        assert made.shapes == ([] if found.any() else [tuple(out.shape)])


class Ranges:
    """Stands in for the ranges of a GPU's profiler."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def open(self, name: str) -> None:
        self.seen.append(name)

    def close(self) -> None:
        self.seen.append("end")


@over_ranks(3)
def test_replays_have_the_named_ranges_of_the_first_call(rank: int, ranks: int) -> None:
    ranges, found = Ranges(), []
    program._ranges = lambda device: (ranges.open, ranges.close)
    for seed in range(5):
        ranges.seen.clear()
        compare(rank, ranks, seed, schedule="ring", kernel="reference")
        found.append(list(ranges.seen))
    first, *others = found
    assert first.count("end") == len(first) / 2 > 4
    assert "dfa backward step 1" in first
    for seen in others:
        assert seen == first


@over_ranks(2)
def test_the_error_of_a_replay_names_the_step(rank: int, ranks: int) -> None:
    for seed in range(2):
        compare(rank, ranks, seed, schedule="ring")
    wrong = f"rank {rank}, step 0 of a distributed forward failed: the cable was pulled"
    with (
        patch.object(GlooTransport, "land", side_effect=RuntimeError("the cable was pulled")),
        pytest.raises(ExecutionError, match=wrong),
    ):
        compare(rank, ranks, 2, schedule="ring")


# Packs.


def compare_pack(rank: int, ranks: int, seed: int, offsets: tuple[int, ...], **options: Any) -> None:
    """Forward and backward of a pack's fresh random tokens against dense float64."""
    attend.compare(attend.pack(offsets, seed=seed), rank, ranks, **options)


@over_ranks(2)
def test_replays_of_packs_that_take_turns_are_exact(rank: int, ranks: int) -> None:
    """Three packs that take turns, each three times: a replay belongs to its pack.

    The kernel takes out in place of delta: the rank that sends no queries leaves delta to it.
    """
    length, real, given = ranks * LOCAL, ReferenceKernel.launch_backward, set[bool]()

    def launch_backward(self: ReferenceKernel, call: Any, dout: torch.Tensor, saved: Saved) -> Any:
        given.add(saved.out is not None)
        return real(self, call, dout, saved if saved.out is None else Saved(saved.lse, minus_delta(dout, saved.out)))

    ReferenceKernel.launch_backward, ReferenceKernel.takes_out = launch_backward, True  # type: ignore[method-assign]
    for turn in range(9):
        offsets = ((0, length), (0, 5, 17, length), (0, 1, 2, length - 3, length))[turn % 3]
        compare_pack(rank, ranks, turn, offsets, kernel="reference", schedule="balanced_shared")
    assert [recorded(prepared) for prepared in in_use()] == [2, 2, 2]
    assert given == ({True, False}, {False})[rank], "helped rows come with delta"


def lengths(prepared: Prepared) -> list[int]:
    """The operations of each of its recordings."""
    return [len(found._ops) for found in prepared.bound.values() if isinstance(found, Bound)]


@over_ranks(2, 3)
def test_a_new_pack_is_recorded_at_once_where_another_has_run(rank: int, ranks: int) -> None:
    """A pack, once; then others, recorded at once: as a second run would be, and exact when replayed."""
    length = ranks * LOCAL
    for options in ({"schedule": "greedy"}, {"kernel": "reference"}, {"layout": "load_balanced"}):
        compare_pack(rank, ranks, 0, (0, 7, length), **options)
        for offsets in ((0, 3, 20, length), (0, 1, 2, length - 5, length), (0, 11, length)):
            compare_pack(rank, ranks, 1, offsets, **options)
            prepared = in_use()[-1]
            first = lengths(prepared)
            compare_pack(rank, ranks, 2, offsets, **options)
            prepared.bound.clear()
            compare_pack(rank, ranks, 3, offsets, **options)
            assert (len(first), lengths(prepared)) == (2, first)


@over_ranks(1)
def test_a_first_run_that_cannot_be_recorded_has_a_second_chance(rank: int, ranks: int) -> None:
    """A kernel that reads a number back in the first forward of a second pack."""
    real, reads = ReferenceKernel.launch, list[torch.Tensor]()

    def launch(self: ReferenceKernel, call: Any) -> Any:
        if reads:
            reads.pop().copy_(call.q.sum().item())
        return real(self, call)

    ReferenceKernel.launch = launch  # type: ignore[method-assign]
    compare_pack(0, 1, 0, (0, 5, LOCAL), kernel="reference")
    reads.append(torch.zeros(()))
    for seed, found in enumerate((1, 2, 2)):
        compare_pack(0, 1, seed, (0, 4, LOCAL), kernel="reference")
        assert recorded(in_use()[-1]) == found
