"""The worker pool: results by rank, failures with their traceback, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.workers import over_ranks, run_ranks


@dataclass(frozen=True)
class Box:
    """A type of this module, to travel both ways."""

    value: torch.Tensor


def total(rank: int, world_size: int, box: Box) -> Any:
    value = box.value + rank
    dist.all_reduce(value)
    return {"rank": rank, "box": Box(value), "threads": torch.get_num_threads(), "size": dist.get_world_size()}


def fail_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ZeroDivisionError(f"rank {rank} of {world_size} cannot")
    dist.barrier()


def die_on(rank: int, world_size: int, bad: int) -> int:
    if rank == bad:
        os._exit(7)
    return os.getpid()


def hang_on(rank: int, world_size: int, bad: int) -> None:
    while rank == bad:
        time.sleep(0.05)


def environment(rank: int, world_size: int, name: str) -> tuple[str | None, list[str]]:
    return os.environ.get(name), sys.path


@over_ranks(2)
def test_groups_take_keywords_that_a_newer_torch_gives(rank: int, world_size: int) -> None:
    store = dist.PrefixStore("newer", dist.distributed_c10d._get_default_store())
    group = dist.distributed_c10d.ProcessGroupGloo(
        store, rank, world_size, timeout=timedelta(seconds=20), enable_reconfigure=False, named_by_no_release=1
    )
    total = torch.tensor([1.0])
    group.allreduce([total]).wait()
    assert total.item() == 2.0


def leave_at_once(rank: int, world_size: int) -> None:
    sys.exit(3)


def no_children_left() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(world_size, total, Box(torch.arange(4.0)))
    want = world_size * torch.arange(4.0) + sum(range(world_size))
    assert [result["rank"] for result in results] == list(range(world_size))
    assert all(torch.equal(result["box"].value, want) for result in results)
    assert all(result["threads"] == 1 and result["size"] == world_size for result in results)
    assert no_children_left()


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed:(.|\n)*ZeroDivisionError: rank 1 of 2 cannot") as raised:
        run_ranks(2, fail_on, 1, timeout=20)
    assert no_children_left()
    cause = str(raised.value).splitlines()[0]
    assert cause.startswith("rank 1: ZeroDivisionError: rank 1 of 2 cannot"), "the cause stands first"


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 failed:\nthe process died with exit code 7"):
        run_ranks(2, die_on, 1, timeout=20)
    assert no_children_left()


def test_a_rank_that_exits_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="SystemExit: 3"):
        run_ranks(1, leave_at_once)


def test_a_rank_that_hangs_is_killed_and_its_stack_shown() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 did not end (.|\n)*hang_on"):
        run_ranks(2, hang_on, 1, timeout=6)
    assert time.monotonic() - start < 40
    assert no_children_left()


def test_workers_see_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_VARIABLE_OF_THIS_TEST", "seen")
    assert run_ranks(1, environment, "A_VARIABLE_OF_THIS_TEST") == [("seen", sys.path)]


def test_a_function_that_cannot_travel_is_refused_before_anything_starts() -> None:
    with pytest.raises((AttributeError, TypeError, ValueError), match=r"pickle|local"):
        run_ranks(2, lambda rank, world_size: None)
    assert no_children_left()
