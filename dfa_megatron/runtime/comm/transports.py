"""Messages point to point, over gloo or NCCL, and which transport serves the ranks of a channel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.copy_engine import open_transport
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, StreamTransport, Transport

if TYPE_CHECKING:
    from dfa_megatron.runtime.comm.channel import Channel

_peer = attrgetter("peer")


class GlooTransport(Transport):
    """Point-to-point over gloo: its threads move a batch during compute, and the host waits where it lands.

    wait: runs a blocking call, and raises if another rank has failed.
    """

    def __init__(self, communicator: Communicator, wait: Callable[[Callable[[], object]], None]) -> None:
        self._communicator, self._wait = communicator, wait
        self._where: tuple[int, tuple[int, ...]] = (-1, ())
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def where(self) -> tuple[int, tuple[int, ...]]:
        return self._where

    def start(self) -> None:
        self._where = (0, ())

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        self.sending = sends(nullcontext)
        self._where = after + 1, tuple(map(_peer, receives))
        self.works = self._communicator.post(self.sending, receives)

    def land(self) -> None:
        if works := self.works:
            self._wait(lambda: [work.wait() for work in works])
        self.works, self.sending = [], ()
        self._where = self._where[0] + 1, ()


class NcclTransport(StreamTransport):
    """Point-to-point over NCCL; the host never waits."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        super().__init__(device)
        self._communicator = communicator
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        with self.moving():
            self.wait_for_compute(after)
            self.sending = sends(nullcontext)
            self.works = self._communicator.post(self.sending, receives)
        self.awaited[self.steps] = tuple(map(_peer, receives))

    def land(self) -> None:
        with self.moving():
            for work in self.works:
                work.wait()  # the communication stream waits, not the host
        self.works, self.sending = [], ()
        super().land()


logger = logging.getLogger(__name__)

_ONE_DEVICE = "their memory is on one device of a process, and this is another"
_ONE_QUEUE = "with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels would queue up behind its waits, which has not been measured"


class Transports:
    """The open transports of the ranks of a channel, by device and kind: streams and communicators belong to one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[tuple[str, str], Transport] = {}

    def get(self, device: torch.device, kind: str = "auto") -> Transport:
        """Return the transport for tensors on that device; the first call is collective.

        The first call comes after the ranks have agreed: one with tensors elsewhere has been told so.

        Args:
            device: of the tensors.
            kind: "p2p", "copy_engine", or "auto" for the faster one that serves.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and cannot serve these ranks.
        """
        place = str(device)
        known = self._open.get((place, kind))
        if known is None:
            known = self._make(device, kind)  # which may open another kind
            known.ranks = self._channel.ranks
            self._open[place, kind] = known
            self._channel.calls.on_device(device)
        return known

    def _make(self, device: torch.device, kind: str) -> Transport:
        if kind == "auto":
            # Megatron asks for one queue on Hopper.
            why = _ONE_QUEUE if self._channel.one_queue else ""
            try:
                if device.type != "cpu" and not why:
                    return self.get(device, "copy_engine")
            except UnsupportedError as error:
                why = error.why
            if device.type != "cpu":
                logger.info("messages go point to point: the copy engines do not serve: %s", why)
            return self.get(device, "p2p")
        if kind == "copy_engine":
            others = any(kind == other for _, other in self._open)
            found = _ONE_DEVICE if others else open_transport(self._channel, device)
            if isinstance(found, str):
                raise UnsupportedError("transport='copy_engine'", found, "transport='p2p'")
            return found
        own = self._channel.new_communicator(device)
        return GlooTransport(own, self._channel.wait) if device.type == "cpu" else NcclTransport(own, device)

    def reserve(self, device: torch.device, kind: str, nbytes: int) -> Transport:
        """Return that kind of transport, with receive memory for the next call; collective if memory moves.

        If a GPU has no memory for it, "auto" is point to point from then on.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and a GPU has no memory for it; on every rank.
        """
        transport = self._open.get((str(device), kind)) or self.get(device, kind)
        try:
            transport.reserve(nbytes)
        except UnsupportedError as error:
            if kind != "auto":
                raise
            logger.warning("messages go point to point from now on: %s", error.why)
            transport = self._open[str(device), kind] = self.get(device, "p2p")
        return transport

    def clear(self) -> None:
        """Let go of all transports and their memory."""
        self._open.clear()
