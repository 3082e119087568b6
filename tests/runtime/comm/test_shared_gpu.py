"""Ranks that share a GPU: who opens whose memory, and what tests tell NCCL. Tests marked gpu(n) run so on one GPU."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.surroundings import share_gpus
from dfa_megatron.runtime.comm import copy_engine, symmetric_memory
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.symmetric_memory import Mapped
from tests.support.workers import run_ranks


def _opens(rank: int, ranks: int) -> tuple[list[str], list[int], int]:
    """The handles that a rank opens, the addresses that it gets, and the address of its own memory."""
    made, opened = iter(range(ranks)), list[str]()

    def handle(memory: torch.Tensor) -> str:
        return f"{rank}.{next(made)}"

    def opens(handle: str, device: int | None) -> Any:
        opened.append(handle)
        return SimpleNamespace(data_ptr=lambda: 1000 + int(handle[0]))

    symmetric_memory._handle, symmetric_memory._open = handle, opens  # the process ends with this function
    memory = torch.empty(8, dtype=torch.uint8)
    mapped = symmetric_memory._opened(memory, channel_of(None))
    assert len(mapped.others) == ranks - 1
    return opened, mapped.addresses, memory.data_ptr()


def test_each_rank_opens_the_handle_that_every_other_made_for_it_alone() -> None:
    told = run_ranks(3, _opens)
    handles = [handle for opened, _, _ in told for handle in opened]
    assert len(set(handles)) == len(handles) == 6
    for rank, (opened, addresses, own) in enumerate(told):
        assert [int(handle[0]) for handle in opened] == [other for other in range(3) if other != rank]
        assert addresses == [own if other == rank else 1000 + other for other in range(3)]


def test_memory_of_another_gpu_is_mapped_for_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to raise a flag in memory that is mapped for its owner's GPU alone."""
    for_devices: list[int] = []
    monkeypatch.setattr(
        torch.UntypedStorage, "_new_shared_cuda", lambda device, *_: for_devices.append(device), raising=False
    )
    handle = json.dumps([0, "00", 8, 0, "00", 0, "00", False])
    symmetric_memory._open(handle, 1)
    assert for_devices == [1]


def _opened_for(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the transport of ranks on these GPUs takes them as shared."""
    asked: list[bool] = []

    class Transport:
        def __init__(self, over: object, device: torch.device, *, shared: bool) -> None:
            asked.append(shared)

        def trial(self) -> None:
            pass

    def exchange(facts: dict[str, str], _: str) -> list[dict[str, str]]:
        return [facts | {"gpu": gpu} for gpu in gpus]

    monkeypatch.setattr(copy_engine, "CopyEngineTransport", Transport)
    monkeypatch.setattr(copy_engine, "_local_refusal", lambda device: "")
    monkeypatch.setattr(copy_engine, "_gpu", lambda device: gpus[0])
    over: Any = SimpleNamespace(exchange=exchange, size=len(gpus), rank=0)
    assert isinstance(copy_engine.open_transport(over, torch.device("cuda", 0)), Transport)
    return asked


def test_a_gpu_is_told_by_its_identity_and_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _opened_for(["a", "b"], monkeypatch) == [False]  # each process sees one, as device 0
    assert not caplog.records
    assert _opened_for(["a", "b", "a"], monkeypatch) == [True]
    assert "ranks share a GPU" in caplog.text


def test_memory_is_mapped_by_the_way_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    over: Any = SimpleNamespace(exchange=lambda facts, _: [facts])
    for name in ("_zeros", "_of_pytorchs_allocator"):
        monkeypatch.setattr(symmetric_memory, name, lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "_mapped", lambda memory, over: Mapped(memory, [1]))
    monkeypatch.setattr(symmetric_memory, "_opened", lambda memory, over: Mapped(memory, [2]))
    for shared, address in ((False, 1), (True, 2)):
        mapped = symmetric_memory.symmetric(8, over, torch.device("cpu"), shared=shared)
        assert (mapped.memory.numel(), mapped.addresses) == (8, [address])


@pytest.mark.parametrize(("gpus", "host", "chosen"), [(1, "rank-3", 0), (2, "rank-3", 1), (4, None, 3)])
def test_ranks_are_hosts_of_their_own_only_where_they_share_gpus(
    gpus: int, host: str | None, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    share_gpus(3, 4)
    assert (os.environ.get("NCCL_HOSTID"), found) == (host, [chosen])
    assert os.environ.get("NCCL_SOCKET_IFNAME") == ("lo" if host else None)
