"""Rank 0 keeps the store and ends at once: the others still get the table of differences, and are still watched."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import dfa_megatron
from dfa_megatron.errors import DisagreementError
from dfa_megatron.runtime.agreement.calls import Calls, Kind, first_difference
from dfa_megatron.runtime.agreement.store import GroupStore
from dfa_megatron.runtime.agreement.watch import Watch
from dfa_megatron.runtime.comm.channel import Channel
from tests.runtime.agreement.test_watch import watched
from tests.support.arguments import arguments, tensors, told
from tests.support.groups import rank_0_keeps_the_store
from tests.support.workers import run_ranks

SCALES = (0.25, 0.5)


def attend(scale: float, group: Any = None) -> None:
    options = arguments(causal=True, schedule="ring", softmax_scale=scale, group=group)
    dfa_megatron.dist_flash_attn_func(*tensors(), **options)


def _differ(rank: int, ranks: int, folder: str, way: str) -> None:
    rank_0_keeps_the_store(rank, ranks, Path(folder))
    for scale in SCALES:
        attend(scale)
    if rank:  # the others are slow to read, so that rank 0 has ended
        quick = GroupStore.gather

        def slow(self: GroupStore, key: str, *args: Any) -> list[str | None]:
            time.sleep(0.3 if key == "calls" else 0)
            return quick(self, key, *args)

        GroupStore.gather = slow  # type: ignore[method-assign]
    if way != "at the call":  # as over NCCL, where heartbeats tell
        Channel._meet = lambda self: []  # type: ignore[method-assign]

    def attends() -> None:
        for scale in SCALES[::-1] if rank == ranks - 1 else SCALES:
            attend(scale)
        while True:
            time.sleep(0.05)
            attend(SCALES[0])

    Path(folder, f"rank{rank}").write_text(told(attends))
    if rank == 0 and way == "watched, then destroyed":
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # as a script does when it ends
    if rank:
        time.sleep(1.0)
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "way"), [(2, "at the call"), (3, "at the call"), (2, "watched"), (2, "watched, then destroyed")]
)
def test_every_rank_gets_the_table_where_rank_0_ends_at_once(ranks: int, way: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # no rank answers the test
        run_ranks(ranks, _differ, str(tmp_path), way, timeout=60, grace=10.0)
    for rank in range(ranks):
        told = (tmp_path / f"rank{rank}").read_text()
        assert "run different attentions" in told, told
        if way != "watched":  # a process that vanishes may not have shown its calls
            assert "after 4 equal calls:\n  call 5: forward of q" in told
            assert told.count("softmax_scale=0.25") == told.count("softmax_scale=0.5") == 1


def _gone_before(rank: int, ranks: int, folder: str) -> None:
    rank_0_keeps_the_store(rank, ranks, Path(folder), seconds=2.0)
    group = dist.new_group([0, 1])
    dist.barrier()
    if rank == 0:
        os._exit(0)
    time.sleep(0.5)
    Path(folder, "told").write_text(told(lambda: attend(0.25, group)))
    os._exit(0)


def test_a_store_that_is_gone_before_the_first_attention_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, _gone_before, str(tmp_path), timeout=60, grace=20.0)
    told = (tmp_path / "told").read_text()
    assert told.startswith("AbsentError: the store of the group is gone"), told
    assert "rank 0 of the group, which kept it, has ended" in told


def test_the_watch_goes_on_after_errors_of_the_store() -> None:
    store, fails, calls = HashStore(), threading.Event(), (Calls(), Calls())

    class Failing:
        """A store that answers with errors while `fails` is set."""

        def __getattr__(self, name: str) -> Any:
            if fails.is_set():
                raise dist.DistNetworkError("Broken pipe")
            return getattr(store, name)

    groups = [watched(store, rank, (0, 1), calls[rank], timeout=9e9) for rank in range(2)]
    watches = [Watch(Failing(), rank, 2) for rank in range(2)]  # type: ignore[arg-type]
    try:
        for watch, group in zip(watches, groups, strict=True):
            group.store.client = watch.client
            watch.watch(group)
            watch.thread.start()
        fails.set()
        time.sleep(1.2)
        fails.clear()
        for one, text in zip(calls, ("forward", "backward"), strict=True):
            one.add(Kind.of(text))
        deadline = time.monotonic() + 10
        while any(one.lost is None for one in calls) and time.monotonic() < deadline:
            time.sleep(0.05)
        for one in calls:
            assert "call 1: forward on rank 0; backward on rank 1" in str(one.lost)
        fails.set()
        assert isinstance(groups[0].difference(), DisagreementError), "not the store's own error"
        assert all(watch.thread.is_alive() for watch in watches)
    finally:
        fails.clear()
        for watch, group in zip(watches, groups, strict=True):
            watch.leave(group)


def _calls(*texts: str, facts: str = "") -> str:
    calls = Calls()
    for text in texts:
        calls.add(Kind.of(text, facts))
    return calls.shown()


def test_the_table_claims_no_more_than_what_ranks_have_shown() -> None:
    one, other = _calls(*"aabb"), _calls(*"aaba")
    assert "after 3 equal calls:\n  call 4: b on rank 0; a on rank 1" in first_difference([one, other])
    assert "call 4: b on rank 0; a on rank 1; does not answer on rank 2" in first_difference([one, other, None])
    assert "call 3: b on rank 0; has not come so far on rank 1" in first_difference([one, _calls("a", "a")])
    alone = first_difference([None, one])
    assert "equal calls" not in alone
    assert "do not say in which call" in alone
    assert "does not answer on rank 0; b (call 4) on rank 1" in alone
    alike = first_difference([_calls("a"), _calls("a", facts="another mask of that name")])
    assert alike.count("a (digest ") == 2
