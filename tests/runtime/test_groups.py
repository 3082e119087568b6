"""Process groups are theirs who made them: nothing here keeps one past `dist.destroy_process_group`."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import dfa_megatron
from dfa_megatron.runtime.comm.channel import channel
from dfa_megatron.runtime.comm.groups import before_destroying, group_name
from dfa_megatron.testing.workers import run_ranks


def _attend(ranks: int) -> None:
    q, k, v = (torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    for options in ({"schedule": "ring"}, {"ulysses_degree": 2, "schedule": "ring"}):
        dfa_megatron.dist_flash_attn_func(q, k, v, **options).sum().backward()
    packed = (x.detach()[0] for x in (q, k, v))
    dfa_megatron.dist_flash_attn_varlen_func(*packed, (0, 5, 8 * ranks))


def _kept(rank: int, ranks: int) -> tuple[int, int]:
    """How many groups and communicators there were, and how many are left after all groups were destroyed."""
    _attend(ranks)
    whole = channel(group_name(None))
    made = [x._backend for part in (whole, *whole._subgroups.values()) for x in part._made]
    groups = [weakref.ref(x) for x in (*distributed_c10d._world.pg_map, *made)]
    dist.barrier()
    del whole, made
    dist.destroy_process_group()
    gc.collect()
    return len(groups), sum(group() is not None for group in groups)


def test_no_group_is_kept_after_all_were_destroyed() -> None:
    """A gloo group that is kept has threads, which now and then abort a process that ends."""
    for made, left in run_ranks(4, _kept):
        assert made >= 5  # the default group; messages and comparisons of all ranks; of each pair
        assert left == 0


def _again(rank: int, ranks: int) -> int:
    _attend(ranks)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)
    _attend(ranks)
    return len(distributed_c10d._world.pg_map)


def test_groups_can_be_made_anew_under_the_same_names() -> None:
    assert len(set(run_ranks(2, _again))) == 1


def _released(rank: int, ranks: int) -> tuple[list[str], bool]:
    """What happened in which order, and whether the process still has a name of before for the function."""
    events: list[str] = []
    before_destroying(lambda group: events.append("all released" if group is None else "one released"))
    part = dist.new_group([0, 1])
    dist.destroy_process_group(part)
    events.append("one destroyed")
    before = dist.destroy_process_group
    before_destroying(lambda group: events.append("released, too"))
    dist.barrier()
    dist.destroy_process_group()
    events.append("all destroyed" if not dist.is_initialized() else "some are left")
    return events, before is dist.destroy_process_group


def test_what_groups_would_wait_for_is_released_before_all_are_destroyed() -> None:
    for events, once in run_ranks(2, _released):
        assert events == ["one released", "one destroyed", "all released", "released, too", "all destroyed"]
        assert once


def _before_its_groups(rank: int, ranks: int) -> tuple[float, bool]:
    """How far a module that was built without process groups is from the function; and one that was given none."""
    with patch.object(dist, "is_initialized", return_value=False):
        module, alone = dfa_megatron.DistFlashAttention(), dfa_megatron.DistFlashAttention(group="")
    q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)) for _ in range(3))
    want = dfa_megatron.dist_flash_attn_func(q, k, v)
    assert isinstance(want, torch.Tensor)
    return float((module(q, k, v) - want).abs().max()), bool(torch.equal(alone(q, k, v), want))


def test_a_module_may_be_built_before_its_process_groups() -> None:
    (first, _), (second, alone) = run_ranks(2, _before_its_groups)
    assert max(first, second) == 0.0
    assert not alone


def _timeouts(rank: int, ranks: int) -> set[timedelta | None]:
    patient = dist.new_group([0, 1], timeout=timedelta(hours=3))
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    dfa_megatron.dist_flash_attn_func(q, k, v, group=patient, ulysses_degree=2)
    dfa_megatron.dist_flash_attn_func(q, k, v, group=patient)
    known = channel(group_name(patient))
    parts = [*known._subgroups.values(), known]
    return {made.timeout for one in parts for made in one._made}


def test_communicators_wait_as_long_as_the_group_that_they_serve() -> None:
    assert run_ranks(2, _timeouts) == [{timedelta(hours=3)}] * 2


def _without_a_backend(rank: int, ranks: int) -> str:
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)
    _attend(ranks)
    return str(dist.get_backend())


def test_a_group_whose_backend_was_left_to_pytorch_works() -> None:
    assert len(set(run_ranks(2, _without_a_backend))) == 1
