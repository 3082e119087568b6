"""Process groups are theirs who made them: nothing here keeps one past `dist.destroy_process_group`."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import LostGroupError, UnsupportedError
from dfa_megatron.runtime.agreement.calls import Calls
from dfa_megatron.runtime.comm import channel as channels
from dfa_megatron.runtime.comm import copy_engine, transport, transports
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import _channels, channel_of, group_name, timeout_of
from dfa_megatron.runtime.comm.transport import StreamTransport
from dfa_megatron.runtime.comm.transports import Transports
from dfa_megatron.runtime.prepare import in_use
from tests.support.arguments import arguments, tensors, told
from tests.support.workers import over_ranks


def test_plans_may_be_listed_while_groups_end() -> None:
    """As a report does, while they close groups on threads of their own."""
    over, done = SimpleNamespace(prepared={}, closed=False), threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for number in range(20):
                _channels[f"group {number}"] = over  # type: ignore[assignment]
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
    q, k, v = tensors()
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


@over_ranks(4)
def test_no_group_is_kept_after_all_were_destroyed(rank: int, ranks: int) -> None:
    """A gloo group that is kept has threads, which now and then abort a process that ends."""
    _attend(ranks)
    whole = channel_of(None)
    made = [x._backend for x in whole._made.values()]
    groups = [weakref.ref(x) for x in (*distributed_c10d._world.pg_map, *made)]
    dist.barrier()
    del whole, made
    dist.destroy_process_group()
    assert len(groups) >= 2  # the default group, and ours
    assert _soon(lambda: sum(group() is not None for group in groups)) == 0
    assert in_use() == ()


@over_ranks(2)
def test_a_backward_whose_group_was_destroyed_waits_for_nobody(rank: int, ranks: int) -> None:
    """On a rank that waits in it, and on one that comes later."""
    group = dist.new_group([0, 1])
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=group)
    assert isinstance(out, torch.Tensor)
    closed = weakref.ref(channel_of(group))
    dist.barrier()
    dist.destroy_process_group(group)
    late = rank == 1 and _soon(lambda: int(not closed().closed))  # type: ignore[union-attr]
    assert not late
    with pytest.raises(LostGroupError, match="process group was destroyed"):
        out.sum().backward()


@over_ranks(2)
def test_without_a_watch_a_destroyed_group_goes_with_the_next_that_is_made(rank: int, ranks: int) -> None:
    """Plans that are left of a destroyed group without a watch: at once, and after an attention over another one."""
    ours = dist.destroy_process_group
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    for _ in range(2):
        part = dist.new_group([0, 1])
        dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=part, config=DistAttentionConfig(verify="off"))
        dist.barrier(part)
        dist.destroy_process_group(part)
    before = len(in_use())
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    assert (before, len(in_use())) == (1, 1)
    assert ours is distributed_c10d.destroy_process_group
    assert ours.__module__ == "torch.distributed.distributed_c10d"


@over_ranks(2)
def test_a_channel_that_is_closed_twice_lets_go_of_its_connections_once(rank: int, ranks: int) -> None:
    """What a channel lets go of."""
    _attend(ranks)
    whole, events = channel_of(None), []
    (made,) = whole._made.values()
    real = made.close

    def closed(*, abort: bool) -> None:
        events.append("connections")
        real(abort=abort)

    made.close = closed  # type: ignore[method-assign]
    dist.barrier()
    whole.close()
    whole.close()
    assert events == ["connections"]


@over_ranks(2)
def test_groups_can_be_made_anew_under_the_same_names(rank: int, ranks: int) -> None:
    _attend(ranks)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks)
    _attend(ranks)
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, len(distributed_c10d._world.pg_map))
    assert len({*counts}) == 1


@over_ranks(2)
def test_a_module_may_be_built_before_its_process_groups(rank: int, ranks: int) -> None:
    with patch.object(dist, "is_initialized", return_value=False):
        module = dfa_megatron.DistFlashAttention(causal=True)
        q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)) for _ in range(3))
        without = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    want = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
    assert isinstance(without, torch.Tensor)
    assert torch.equal(module(q, k, v), want)
    assert rank == 0 or not torch.equal(without, want), "the last rank needs the others"


@over_ranks(2)
def test_communicators_wait_as_long_as_the_group_that_they_serve(rank: int, ranks: int) -> None:
    patient = dist.new_group([0, 1], timeout=timedelta(hours=3))
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=patient, config=DistAttentionConfig(ulysses_degree=2))
    dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, group=patient)
    assert {timeout_of(made._group) for made in channel_of(patient)._made.values()} == {timedelta(hours=3)}


@over_ranks(4)
def test_a_group_may_be_one_dimension_of_a_mesh_and_the_order_of_its_ranks_is_that_of_the_tokens(
    rank: int, ranks: int
) -> None:
    """Attention over a mesh of (2, 2) ranks: by its second dimension as a mesh and a group, and what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(rank)) for _ in range(3))
    attend: Any = partial(dfa_megatron.dist_flash_attn_func, q, k, v, causal=True)
    assert torch.equal(attend(group=mesh["cp"]), attend(group=mesh["cp"].get_group()))
    mine = dfa_megatron.local_positions(16, group=mesh["cp"]).tolist()
    assert mine == list(range(8 * (rank % 2), 8 * (rank % 2) + 8))
    for group, *words in (
        (mesh, 'What works: that dimension: group=mesh["cp"]', "2 dimensions ('dp', 'cp')"),
        (DeviceMesh("cpu", [3, 2, 1, 0]), "a DeviceMesh of ranks [3, 2, 1, 0]", "a mesh whose ranks ascend"),
        (DeviceMesh("cpu", [[0, 1], [2, 3]]), "2 dimensions (2, 2)"),
        ("", "dist.new_group([rank]"),
    ):
        text = told(partial(attend, group=group))
        assert text.startswith("UnsupportedError: ")
        assert all(word in text for word in words)


@over_ranks(3)
def test_a_mesh_without_this_rank_is_refused(rank: int, ranks: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(UnsupportedError, match=r"a DeviceMesh of ranks \[0, 1\]") if rank == 2 else nullcontext():
        group_name(mesh)


FIRST, SECOND, CPU = torch.device("cuda", 2), torch.device("cuda", 0), torch.device("cpu")


class Made:
    """Stands in for a communicator or a transport of a device."""

    def __init__(self, device: torch.device, *_: Any) -> None:
        self.device = device

    def reserve(self, nbytes: int) -> None:
        """Keep nothing."""


def _opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[torch.device]]:
    """Return a channel whose connections are stand-ins, and the devices that its calls follow."""
    channel: Any = object.__new__(Channel)
    channel._devices, channel.one_queue, followed = [], False, []
    channel.calls = SimpleNamespace(on_device=followed.append)
    channel.communicator = Made
    channel.transports = Transports(channel)
    monkeypatch.setattr(copy_engine, "open_transport", lambda over, device: Made(device))
    monkeypatch.setattr(transports, "NcclTransport", lambda own: Made(own.device))
    monkeypatch.setattr(transports, "GlooTransport", lambda own: Made(own.device))
    return channel, followed


@pytest.mark.parametrize("kind", ["auto", "p2p"])
def test_every_device_has_its_own_connections(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    channel, followed = _opened(monkeypatch)
    for device in (FIRST, CPU, SECOND, FIRST, SECOND):
        assert channel.transports.reserve(device, kind, 8).device == device
        assert channel.communicator(device).device == device
    assert set(followed) == {FIRST, CPU, SECOND}


def test_the_copy_engines_serve_one_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = _opened(monkeypatch)
    channel.transports.get(FIRST, "copy_engine")
    with pytest.raises(UnsupportedError, match="on one device of a process"):
        channel.transports.get(SECOND, "copy_engine")


def test_ranks_compare_how_many_devices_they_have_used(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, _ = _opened(monkeypatch)
    found = [channel.place(device) for device in (FIRST, CPU, SECOND, FIRST)]
    assert found == ["cuda", "cpu", "cuda, device 2 of this process", "cuda"]


def test_work_of_every_device_is_pending_from_its_connections_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of all ranks are exchanged without a transport; the watch must see that the device works."""
    done: dict[int, bool] = {}

    class Event:
        def __init__(self) -> None:
            self.number = len(done)
            done[self.number] = True

        def record(self, stream: object) -> None:
            done[self.number] = False

        def query(self) -> bool:
            return done[self.number]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("dfa_megatron.runtime.agreement.calls.current_stream", lambda device: None)
    monkeypatch.setattr(channels, "bounded", lambda make, *_: Made(FIRST))
    channel, _ = _opened(monkeypatch)
    calls = channel.calls = Calls()
    channel._made, channel.timeout = {}, timedelta(seconds=1)
    for device in (CPU, FIRST, SECOND, FIRST):
        Channel.communicator(channel, device)
    assert not calls.pending()
    calls.end()
    assert len(done) == 2
    for number in range(2):
        assert calls.pending()
        done[number] = True
    assert not calls.pending()


@pytest.mark.parametrize(("capturing", "where"), [(False, (1, (3,))), (True, (-1, ()))])
def test_events_of_a_graph_are_never_queried(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, where: tuple[int, tuple[int, ...]]
) -> None:
    """Step 0 is over and step 1 waits for rank 3; in a capture every query is an error of CUDA."""
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    monkeypatch.setattr(transport, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    over = iter((True, False))

    def query() -> bool:
        if capturing:
            raise RuntimeError("CUDA error: invalid argument")
        return next(over)

    monkeypatch.setattr(torch.cuda, "Event", lambda: MagicMock(query=query))
    streams = StreamTransport(torch.device("cuda", 0))
    streams.start()
    for step, awaited in enumerate(((2,), (3,))):
        streams.awaited[streams.steps] = awaited
        streams.computed(step)
    assert streams.where() == where
