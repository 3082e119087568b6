"""Point-to-point messages over gloo, for tensors on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.memory.arena import Arena
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends

_peer = attrgetter("peer")


class GlooTransport:
    """Point-to-point over gloo: the host waits where a batch lands."""

    generation = 0
    pinned = False
    beside_kernels = queued = keeps_arena = False

    def __init__(self, communicator: Communicator, wait: Callable[[Callable[[], object]], None]) -> None:
        """Use a communicator. `wait` runs a blocking call, and raises if another rank has failed."""
        self._communicator, self._wait = communicator, wait
        self._where: tuple[int, tuple[int, ...]] = (-1, ())
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def reserve(self, nbytes: int) -> None:
        """Do nothing: each run allocates its own arena."""

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Allocate memory for one run."""
        return Arena.allocate(nbytes, device)

    def start(self) -> None:
        """Begin at the first step."""
        self._where = (0, ())

    def where(self) -> tuple[int, tuple[int, ...]]:
        """See `Transport`."""
        return self._where

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Start the batch; gloo's threads move it during compute."""
        self.sending = sends(nullcontext)
        self._where = after + 1, tuple(map(_peer, receives))
        self.works = self._communicator.post(self.sending, receives)

    def land(self) -> None:
        """Wait for the batch."""
        if works := self.works:
            self._wait(lambda: [work.wait() for work in works])
        self.works, self.sending = [], ()
        self._where = self._where[0] + 1, ()

    def computed(self, step: int) -> None:
        """Do nothing: on a CPU the host has computed it."""

    def finish(self) -> None:
        """Do nothing: all batches have landed."""
