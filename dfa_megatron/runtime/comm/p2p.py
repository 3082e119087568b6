"""Point-to-point messages on a communicator of our own: over gloo for tensors on CPUs, over NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.streams import StreamTransport
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, Transport

_peer = attrgetter("peer")


class GlooTransport(Transport):
    """Point-to-point over gloo: its threads move a batch during compute, and the host waits where it lands.

    wait: runs a blocking call, and raises if another rank has failed.
    """

    name = "gloo"

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
            if Transport.mark:
                Transport.mark()
            self._wait(lambda: [work.wait() for work in works])
            if Transport.mark:
                Transport.mark()
        self.works, self.sending = [], ()
        self._where = self._where[0] + 1, ()


class NcclTransport(StreamTransport):
    """Point-to-point over NCCL; the host never waits."""

    name = "nccl"

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
