"""Devices of one type in one process: each has its own streams and communicators, and ranks compare which they use."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.agreement.calls import Calls
from dfa_megatron.runtime.comm import channel as channels
from dfa_megatron.runtime.comm import copy_engine, transport, transports
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.transport import StreamTransport
from dfa_megatron.runtime.comm.transports import Transports

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
