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


def ends(rank: int, world_size: int, bad: int, how: str) -> None:
    while rank == bad:
        if how == "raises":
            raise ZeroDivisionError(f"rank {rank} of {world_size} cannot")
        if how == "dies":
            os._exit(7)
        if how == "exits":
            sys.exit(3)
        time.sleep(0.05)
    if how == "raises":
        dist.barrier()


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
        run_ranks(2, ends, 1, "raises", timeout=20)
    assert no_children_left()
    cause = str(raised.value).splitlines()[0]
    assert cause.startswith("rank 1: ZeroDivisionError: rank 1 of 2 cannot"), "the cause stands first"


@over_ranks(2)
def fails_on_the_last(rank: int, ranks: int, given: str) -> None:
    assert (rank, given) == (0, "given")


def test_a_check_that_fails_on_a_rank_fails_the_test_that_runs_it() -> None:
    with pytest.raises(AssertionError, match=r"^rank 1: AssertionError"):
        fails_on_the_last(given="given")


@pytest.mark.parametrize(
    ("how", "ranks", "said"),
    [
        ("dies", 2, r"rank 1 failed:\nthe process died with exit code 7"),
        ("exits", 1, "SystemExit: 3"),
        ("hangs", 2, r"rank 1 did not end (.|\n)*in ends"),
    ],
)
def test_a_rank_that_ends_otherwise_or_not_at_all_is_named_and_killed(how: str, ranks: int, said: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=said):
        run_ranks(ranks, ends, ranks - 1, how, timeout=6 if how == "hangs" else 20)
    assert time.monotonic() - start < 40
    assert no_children_left()


def test_workers_see_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_VARIABLE_OF_THIS_TEST", "seen")
    assert run_ranks(1, environment, "A_VARIABLE_OF_THIS_TEST") == [("seen", sys.path)]


def test_a_function_that_cannot_travel_is_refused_before_anything_starts() -> None:
    with pytest.raises((AttributeError, TypeError, ValueError), match=r"pickle|local"):
        run_ranks(2, lambda rank, world_size: None)
    assert no_children_left()
