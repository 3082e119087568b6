"""An arena that stays between calls: shared by plans, grown on all ranks at one call, and never read once gone.

Also which transport "auto" comes to: not one that keeps its memory, where messages need too much of it. The ranks are
processes, and their messages go over gloo into an arena that is kept as the copy engines keep theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime import prepare
from dfa_megatron.runtime.comm import copy_engine, symmetric_memory
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.copy_engine import CopyEngineTransport
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.symmetric_memory import KeptArena, Mapped
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport
from dfa_megatron.runtime.comm.transports import GlooTransport, Transports
from dfa_megatron.runtime.prepare import in_use
from tests.runtime.comm.test_nccl import compare as compare_on_gpu
from tests.runtime.comm.test_nccl import gpu_case
from tests.runtime.execute.test_bound import compare, recorded
from tests.support.attend import case
from tests.support.workers import over_ranks, run_ranks

BIG, MIDDLE, SMALL = 64, 48, 8
CPU = torch.device("cpu")


class KeptGloo(KeptArena, GlooTransport):
    """gloo into an arena that stays; its memory begins as NaN, and messages must land in it."""

    made = 0
    """Arenas so far."""

    def __init__(self, over: Channel) -> None:
        KeptArena.__init__(self, over, CPU)
        GlooTransport.__init__(self, over.communicator(CPU))

    def allocate(self, nbytes: int) -> Mapped:
        self.over.exchange({})
        self.made += 1
        return Mapped(torch.full((nbytes,), 0xFF, dtype=torch.uint8), [])

    def settle(self) -> None:
        pass

    def post(self, after: int, sends: Callable[[], Sequence[Send]], receives: Sequence[Recv]) -> None:
        first = self._arena.data_ptr()
        for x in (x for recv in receives for x in recv.tensors):
            assert first <= x.data_ptr() <= first + self.size - x.nbytes, "a message lands where the arena was"
        GlooTransport.post(self, after, sends, receives)

    @property
    def size(self) -> int:
        return self._arena.numel()


def keep() -> None:
    """Keep arenas from here on; the process ends with its test."""
    make = Transports._make

    def kept(self: Transports, device: torch.device, kind: str) -> Transport:
        return make(self, device, kind) if kind == "p2p" else KeptGloo(self._channel)

    Transports._make = kept  # type: ignore[method-assign]
    symmetric_memory._ALIGNMENT = 64


def kept_by(group: dist.ProcessGroup | None = None) -> KeptGloo:
    found = channel_of(group).transports.get(CPU, "auto")
    assert isinstance(found, KeptGloo)
    return found


def _grown(rank: int, ranks: int) -> list[int]:
    """Sizes of the arena after each forward and backward."""
    keep()
    found: list[int] = []

    def run(local: int, times: int) -> None:
        for _ in range(times):
            compare(rank, ranks, len(found), local=local, schedule="balanced")
            found.append(kept_by().size)

    run(SMALL, 3)
    assert recorded(in_use()[-1]) == 2
    before = weakref.ref(kept_by()._arena.untyped_storage())
    run(BIG, 1)
    assert before() is None, "something holds the old arena, such as a list that could be replayed"
    run(SMALL, 1)
    assert recorded(in_use()[-1]) == 2, "the small call is replayed, in the new arena"
    run(MIDDLE, 3)
    assert kept_by().made == 2
    return found


def test_all_ranks_grow_the_arena_at_one_call_and_a_smaller_one_is_still_exact() -> None:
    sizes, *others = run_ranks(3, _grown)
    assert all(found == sizes for found in others), "at the same call"
    big, small = max(sizes), min(sizes)
    assert sizes == [small] * 3 + [big] * 5
    assert big == BIG // SMALL * small


@over_ranks(3)
def test_plans_share_the_arena_of_their_group_and_leave_those_of_others_alone(rank: int, ranks: int) -> None:
    """Plans of two groups in turns: each group has one arena, as large as its largest plan needs."""
    keep()
    pair = dist.new_group([0, 1])
    plans: tuple[dict[str, Any], ...] = (
        {"schedule": "ring", "local": 12},
        {"schedule": "balanced", "local": 40},
        {"layout": "zigzag", "local": 24},
        {"schedule": "ring", "kernel": "reference", "local": BIG},
    )
    for turn in range(3):
        for plan in plans:
            compare(rank, ranks, turn, **plan)
            if rank < 2:
                compare(rank, 2, turn, group=pair, **plan)
    arenas = [kept_by(group) for group in (None, pair)[: 2 if rank < 2 else 1]]
    for group, engine in zip((None, pair), arenas, strict=False):
        used = [prepared for prepared in in_use() if prepared.over is channel_of(group)]
        assert len(used) == len(plans)
        assert engine.size == max(prepared.arena_bytes for prepared in used)
        assert len(channel_of(group).transports._open) == 1
    before = [engine._arena for engine in arenas]
    compare(rank, ranks, 3, schedule="ring", local=2 * BIG)
    assert arenas[0]._arena is not before[0]
    if rank < 2:
        assert arenas[1]._arena is before[1], "the other group's is as it was"
        compare(rank, 2, 9, group=pair, **plans[-1])
    _pinned(rank, ranks, arenas[0])


def _pinned(rank: int, ranks: int, engine: KeptGloo) -> None:
    """A graph of the caller's holds addresses: the arena stays, and what needs more memory goes another way."""
    before = engine._arena
    engine.pinned = True
    engine.reserve(1)
    assert engine._arena is before
    with pytest.raises(UnsupportedError, match="a captured CUDA graph holds addresses in it"):
        engine.reserve(1 << 30)
    compare(rank, ranks, 0, schedule="balanced", local=4 * BIG)
    assert engine._arena is before
    assert type(channel_of(None).transports.get(CPU, "auto")) is GlooTransport


@pytest.mark.gpu(2, apart=True)
@over_ranks(2, cuda=True, timeout=120)
def test_the_copy_engines_grow_their_memory_beside_replays(rank: int, ranks: int) -> None:
    big, small = (gpu_case(ranks * local, heads=4, kv_heads=2, head_dim=128) for local in (4096, 64))
    sizes = []
    for whole in [small] * 3 + [big] * 3 + [small] * 2:
        compare_on_gpu(whole, rank, ranks, kernel="aten", transport="copy_engine")
        (engine,) = channel_of(None).transports._open.values()
        assert isinstance(engine, CopyEngineTransport)
        sizes.append(engine._arena.numel())
    assert {*sizes[:3]} == {symmetric_memory._ALIGNMENT}
    assert {*sizes[3:]} == {max(sizes)}
    assert max(sizes) > symmetric_memory._ALIGNMENT
    assert not engine.pinned


@over_ranks(3)
def test_auto_leaves_the_copy_engines_where_their_memory_would_be_too_large(rank: int, ranks: int) -> None:
    """The kinds that a forward and backward ask their channel for, by the largest arena that is allowed."""
    asked: set[str] = set()
    make, real = Transports._make, Transports.reserve

    def noted(self: Transports, device: torch.device, kind: str, nbytes: int) -> Transport:
        asked.add(kind)
        return real(self, device, kind, nbytes)

    Transports._make = lambda self, device, kind: make(self, device, "p2p")  # type: ignore[method-assign]

    Transports.reserve = noted  # type: ignore[method-assign]  # the process ends with this function
    whole, found = case(ranks * 8), []
    for transport, spare in (("auto", 0), ("auto", -1), ("copy_engine", -1), ("p2p", 0)):
        shard, _ = whole.shard(rank, ranks)
        config = DistAttentionConfig(schedule="balanced_shared", transport=transport)
        dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=config).sum().backward()
        prepare.LARGEST_ARENA = prepare.in_use()[-1].arena_bytes + spare
        asked.clear()
        scale = 0.1 + len(found)  # another request
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, softmax_scale=scale, config=config)
        out.sum().backward()
        found.append(set(asked))
    assert found == [{"auto"}, {"p2p"}, {"copy_engine"}, {"p2p"}]


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True)
def test_large_messages_between_gpus_take_no_symmetric_memory(rank: int, ranks: int) -> None:
    whole = case(ranks * 256, dtype=torch.bfloat16, device="cuda", heads=4, kv_heads=2, head_dim=64)
    rows, (shard, _) = whole.rows(rank, ranks), whole.shard(rank, ranks)
    prepare.LARGEST_ARENA = 0
    config = DistAttentionConfig(ulysses_degree=1)  # with exchanged heads there may be no arena at all
    out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=config)
    used = prepare.in_use()[-1]
    assert used.transport == "p2p"
    torch.testing.assert_close(out.double(), whole.out[:, rows].double(), atol=2e-2, rtol=2e-2)


@over_ranks(3)
def test_where_one_gpu_has_no_memory_for_messages_all_ranks_hear_of_it_and_auto_goes_on(rank: int, ranks: int) -> None:
    """Errors of two arenas for which the last rank has no memory, what is left, and what "auto" is then."""
    device, errors = torch.device("cpu"), []
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)  # the process ends with this function
    engine = object.__new__(copy_engine.CopyEngineTransport)
    over = channel_of(None)
    engine.over, engine.device = over, device
    engine._arena, engine._addresses = torch.empty(64, dtype=torch.uint8), [1] * ranks

    def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
        if rank == ranks - 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    symmetric_memory._zeros = zeros
    over.transports._open["cpu", "copy_engine"] = over.transports._open["cpu", "auto"] = engine
    for kind in ("copy_engine", "auto"):
        try:
            over.transports.reserve(device, kind, 1 << 21)
        except UnsupportedError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "rank 2 found no memory, 0.0 GiB for what other ranks write: CUDA driver error" in errors[0]
    assert "What works: transport='p2p'" in errors[0]
    assert engine._arena.numel() + len(engine._addresses) == 0
    assert type(over.transports.get(device, "auto")).__name__ == "GlooTransport"


def test_pytorchs_cache_is_emptied_only_where_the_driver_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, full = [], [False, True]

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if full.pop():
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.full((nbytes,), 7, **options)

    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert torch.equal(symmetric_memory._zeros(8, torch.device("cpu")), torch.zeros(8, dtype=torch.uint8))
    assert (emptied, full) == ([True], [])
    full.append(False)
    symmetric_memory._zeros(8, torch.device("cpu"))
    assert emptied == [True]
