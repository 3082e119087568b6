"""Another rank has failed: a process goes on with whatever it does, and hears of it at its next call."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime import run
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import channel_of
from tests.support.arguments import arguments, tensors, told
from tests.support.groups import alone
from tests.support.workers import over_ranks

BUSY = 1.2
"""Seconds for which a process is elsewhere."""
BLOCKS = 20


def attend(group: dist.ProcessGroup | None = None) -> None:
    dfa_megatron.dist_flash_attn_func(*tensors(), **arguments(causal=True, schedule="ring", group=group))


def fails(*groups: dist.ProcessGroup | None) -> None:
    """Fail in a call on each group without waiting for its other ranks, as a rank over NCCL may."""

    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory in this test")

    setattr(run, "_recorded", broken)  # noqa: B010
    Channel._meet = lambda self: []  # type: ignore[method-assign]
    for group in groups:
        with pytest.raises((DistAttentionError, torch.OutOfMemoryError)):
            attend(group)


def checkpoint(file: Path) -> None:
    with file.open("w") as out:
        for _ in range(BLOCKS):
            print("block", file=out, flush=True)
            time.sleep(BUSY / BLOCKS)


def evaluation() -> None:
    """Compute, attention over another group included."""
    own, deadline = alone(), time.monotonic() + BUSY
    while time.monotonic() < deadline:
        torch.randn(200, 200).softmax(-1).sum().item()
        attend(own)


@over_ranks(2)
def test_a_process_outside_of_attention_goes_on_and_its_next_call_tells(rank: int, ranks: int, tmp_path: Path) -> None:
    """Rank 0 is elsewhere while the watch of two groups knows of rank 1's error; one has a device that waits."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        attend(group)
    if rank == 1:
        fails(*groups)
        time.sleep(4 * BUSY + 2)
        return
    channel_of(groups[1]).calls.pending = lambda: True
    checkpoint(tmp_path / "first")
    evaluation()
    for group in groups:
        text = told(partial(attend, group))
        assert text.startswith("LostGroupError: rank 1 of the group failed in its call "), text
        assert "out of memory in this test" in text
    assert (tmp_path / "first").read_text() == "block\n" * BLOCKS


@pytest.mark.parametrize(("ranks", "phase"), [(2, "forward"), (3, "backward")])
@over_ranks()
def test_a_process_busy_inside_a_call_comes_back_to_the_error_of_another_rank(
    rank: int, ranks: int, phase: str
) -> None:
    """The last rank fails in its kernel; that of the others takes long, as a first compilation may."""
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    group, kernel = dist.new_group([*range(ranks)], timeout=timedelta(seconds=40)), type(kernels.get("reference"))
    real = getattr(kernel, phase)

    def slow(*given: object) -> object:
        if rank == ranks - 1:
            raise torch.OutOfMemoryError("out of memory in this test")
        deadline = time.monotonic() + 2 * BUSY
        while time.monotonic() < deadline:
            sum(range(10_000))
        return real(*given)

    setattr(kernel, phase, slow)
    config = arguments(causal=True, schedule="ring", kernel="reference", group=group)
    found = told(lambda: dfa_megatron.dist_flash_attn_func(q, q, q, **config).sum().backward())
    if rank == ranks - 1:
        time.sleep(3 * BUSY)  # it lives on, and so does the store
        assert found.startswith("ExecutionError: ")
    else:
        assert f"rank {ranks - 1} of the group failed in its call " in found, found
        assert "out of memory in this test" in found
