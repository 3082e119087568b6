"""Process groups are theirs who made them: nothing here keeps one past `dist.destroy_process_group`."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import LostGroupError, UnsupportedError
from dfa_megatron.runtime.comm.groups import _channels, channel_of, group_name
from dfa_megatron.runtime.prepare import in_use
from tests.support.arguments import arguments
from tests.support.workers import run_ranks


def test_plans_may_be_listed_while_groups_end() -> None:
    """As a report does, while they close groups on threads of their own."""
    over, done = SimpleNamespace(prepared={}), threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for number in range(20):
                _channels[f"group {number}"] = None, over  # type: ignore[assignment]
            for number in range(20):
                del _channels[f"group {number}"]

    before, interval = len(in_use()), sys.getswitchinterval()
    thread = threading.Thread(target=come_and_go)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(3000):
            assert len(in_use()) == before
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def _attend(ranks: int) -> None:
    q, k, v = (torch.randn(1, 8, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    for options in ({"schedule": "ring"}, {"ulysses_degree": 2, "schedule": "ring"}):
        dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(**options)).sum().backward()
    packed = (x.detach()[0] for x in (q, k, v))
    dfa_megatron.dist_flash_attn_varlen_func(*packed, (0, 5, 8 * ranks), causal=True)


def _soon(left: Callable[[], int]) -> int:
    """How many are left once a destroyed group has been noticed, or after twenty seconds."""
    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return left()


def _kept(rank: int, ranks: int) -> tuple[int, int, int]:
    """How many groups and communicators there were, and how many and how many plans are left after destruction."""
    _attend(ranks)
    whole = channel_of(None)
    made = [x._backend for part in (whole, *whole._subgroups.values()) for x in part._made]
    groups = [weakref.ref(x) for x in (*distributed_c10d._world.pg_map, *made)]
    dist.barrier()
    del whole, made
    dist.destroy_process_group()
    return len(groups), _soon(lambda: sum(group() is not None for group in groups)), len(in_use())


def test_no_group_is_kept_after_all_were_destroyed() -> None:
    """A gloo group that is kept has threads, which now and then abort a process that ends."""
    for made, left, plans in run_ranks(4, _kept):
        assert made >= 5  # the default group; messages and comparisons of all ranks; of each pair
        assert (left, plans) == (0, 0)


def _backward_of_a_destroyed(rank: int, ranks: int) -> str:
    """What a backward says whose group was destroyed: on a rank that waits in it, and on one that comes later."""
    group = dist.new_group([0, 1])
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=group)
    assert isinstance(out, torch.Tensor)
    closed = weakref.ref(channel_of(group))
    dist.barrier()
    dist.destroy_process_group(group)
    late = rank == 1 and _soon(lambda: int(not closed()._closed))  # type: ignore[union-attr]
    assert not late
    with pytest.raises(LostGroupError) as error:
        out.sum().backward()
    return str(error.value)


def test_a_backward_whose_group_was_destroyed_waits_for_nobody() -> None:
    assert all("process group was destroyed" in said for said in run_ranks(2, _backward_of_a_destroyed))


def _unwatched(rank: int, ranks: int) -> tuple[int, int, bool]:
    """Plans that are left of a destroyed group without a watchdog: at once, and after an attention over another one."""
    ours = dist.destroy_process_group
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    for _ in range(2):
        part = dist.new_group([0, 1])
        dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=part, config=DistAttentionConfig(verify="off"))
        dist.barrier(part)
        dist.destroy_process_group(part)
    before = len(in_use())
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    return (
        before,
        len(in_use()),
        ours is distributed_c10d.destroy_process_group and ours.__module__ == "torch.distributed.distributed_c10d",
    )


def test_without_a_watchdog_a_destroyed_group_goes_with_the_next_that_is_made() -> None:
    assert run_ranks(2, _unwatched) == [(1, 1, True)] * 2


def _closed_twice(rank: int, ranks: int) -> list[str]:
    """What a channel lets go of."""
    _attend(ranks)
    whole, events = channel_of(None), []
    real = whole._made[0].close

    def closed(*, abort: bool) -> None:
        events.append("connections")
        real(abort=abort)

    whole._made[0].close = closed  # type: ignore[method-assign]
    dist.barrier()
    whole.close()
    whole.close()
    return events


def test_a_channel_that_is_closed_twice_lets_go_of_its_connections_once() -> None:
    assert run_ranks(2, _closed_twice) == [["connections"]] * 2


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


def _before_its_groups(rank: int, ranks: int) -> tuple[float, bool]:
    """How far a module that was built without process groups is from the function; whether that needs the others."""
    with patch.object(dist, "is_initialized", return_value=False):
        module = dfa_megatron.DistFlashAttention(causal=True)
        q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)) for _ in range(3))
        without = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    want = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    assert isinstance(want, torch.Tensor)
    return float((module(q, k, v) - want).abs().max()), bool(torch.equal(without, want))


def test_a_module_may_be_built_before_its_process_groups() -> None:
    (first, _), (second, alone) = run_ranks(2, _before_its_groups)
    assert max(first, second) == 0.0
    assert not alone


def _timeouts(rank: int, ranks: int) -> set[timedelta | None]:
    patient = dist.new_group([0, 1], timeout=timedelta(hours=3))
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=patient, config=DistAttentionConfig(ulysses_degree=2))
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=patient)
    known = channel_of(patient)
    parts = [*known._subgroups.values(), known]
    return {made.timeout for one in parts for made in one._made}


def test_communicators_wait_as_long_as_the_group_that_they_serve() -> None:
    assert run_ranks(2, _timeouts) == [{timedelta(hours=3)}] * 2


def _over_meshes(rank: int, ranks: int) -> dict[str, object]:
    """Attention over a mesh of (2, 2) ranks: by its second dimension as a mesh and a group, and what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)) for _ in range(3))

    def attend(group: object) -> torch.Tensor | str:
        try:
            return dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=group)  # type: ignore[arg-type,return-value]
        except UnsupportedError as error:
            return str(error)

    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    return {
        "equal": torch.equal(attend(mesh["cp"]), attend(mesh["cp"].get_group())),  # type: ignore[arg-type]
        "sharded": dfa_megatron.local_positions(16, group=mesh["cp"]).tolist(),
        "whole": attend(mesh),
        "backwards": attend(backwards),
        "nameless": attend(DeviceMesh("cpu", [[0, 1], [2, 3]])),
        "empty": attend(""),
    }


def test_a_group_may_be_one_dimension_of_a_mesh_and_the_order_of_its_ranks_is_that_of_the_tokens() -> None:
    for rank, found in enumerate(run_ranks(4, _over_meshes)):
        assert found["equal"]
        assert found["sharded"] == list(range(8 * (rank % 2), 8 * (rank % 2) + 8))
        assert 'What works: that dimension: group=mesh["cp"]' in found["whole"]
        assert "2 dimensions ('dp', 'cp')" in found["whole"]
        assert "2 dimensions (2, 2)" in found["nameless"]
        assert "a DeviceMesh of ranks [3, 2, 1, 0]" in found["backwards"]
        assert "a mesh whose ranks ascend" in found["backwards"]
        assert "dist.new_group([rank]" in found["empty"]


def _ahead_of(rank: int, ranks: int) -> list[str]:
    """A mesh of ranks 0 and 1, as a rank that is no member of it meets it."""
    mesh = DeviceMesh("cpu", [0, 1])
    try:
        group_name(mesh)
    except UnsupportedError as error:
        return [str(error)]
    return []


def test_a_mesh_without_this_rank_is_refused() -> None:
    first, second, stranger = run_ranks(3, _ahead_of)
    assert first == second == []
    assert "a DeviceMesh of ranks [0, 1]" in stranger[0]
