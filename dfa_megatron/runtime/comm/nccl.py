"""Point-to-point messages over NCCL, on a communicator and a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.memory.arena import Arena
from dfa_megatron.runtime.comm.streams import Streams
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends


class NcclTransport:
    """Point-to-point over NCCL, on a communicator and a stream of its own; the host never waits."""

    generation = 0
    pinned = False
    beside_kernels = keeps_arena = False
    queued = True

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self.streams = communicator, Streams(device)
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def reserve(self, nbytes: int) -> None:
        """Do nothing: each run allocates its own arena."""

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Allocate memory for one run."""
        return Arena.allocate(nbytes, device)

    def start(self) -> None:
        """See `Streams.start`."""
        self.streams.start()

    def where(self) -> tuple[int, tuple[int, ...]]:
        """See `Streams.where`."""
        return self.streams.where()

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Queue the batch on the communication stream."""
        with self.streams.moving():
            self.streams.wait_for_compute(after)
            self.sending = sends(nullcontext)
            self.works = self._communicator.post(self.sending, receives)
        self.streams.await_ranks(tuple(recv.peer for recv in receives))

    def land(self) -> None:
        """Queue the wait of the compute stream."""
        with self.streams.moving():
            for work in self.works:
                work.wait()  # the communication stream waits, not the host
        self.works, self.sending = [], ()
        self.streams.land()

    def computed(self, step: int) -> None:
        """See `Streams.computed`."""
        self.streams.computed(step)

    def finish(self) -> None:
        """Do nothing: the compute stream already waits for every batch."""
