"""Packs replay exactly; a new one is recorded in its first run where another has run."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.api import Saved
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.runtime.execute.bound import Bound
from dfa_megatron.runtime.prepare import Prepared, in_use
from tests.runtime.execute.test_bound import LOCAL, recorded
from tests.support.attend import compare, pack
from tests.support.workers import over_ranks


def compare_pack(rank: int, ranks: int, seed: int, offsets: tuple[int, ...], **options: Any) -> None:
    """Forward and backward of a pack's fresh random tokens against dense float64."""
    compare(pack(offsets, seed=seed), rank, ranks, **options)


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
