"""Point-to-point messages over gloo, for tensors on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.arena import Arena
from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.transport import Recv, Send


class GlooTransport:
    """Point-to-point over gloo: the host waits where a step lands."""

    generation = 0

    def __init__(self, communicator: Communicator, wait: Callable[[Callable[[], object]], None]) -> None:
        """`wait` waits for what blocks, and raises where that has become pointless."""
        self._communicator, self._wait = communicator, wait
        self._where: tuple[int, tuple[int, ...]] = (-1, ())
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def reserve(self, nbytes: int) -> None:
        """Each call takes its memory from PyTorch's allocator."""

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Memory of the call's own."""
        return Arena.allocate(nbytes, device)

    def start(self) -> None:
        """Nothing runs behind the host's back on a CPU."""
        self._where = (-1, ())

    def where(self) -> tuple[int, tuple[int, ...]]:
        """See `Transport`."""
        return self._where

    def post(self, after: int, sends: Callable[[], Sequence[Send]], receives: Sequence[Recv]) -> None:
        """Start the batch; the peers' threads move it during compute."""
        self.sending = sends()
        self._where = self._where[0] + 1, tuple(recv.peer for recv in receives)
        self.works = self._communicator.post(self.sending, receives)

    def land(self) -> None:
        """Wait for the batch."""
        if works := self.works:
            self._wait(lambda: [work.wait() for work in works])
        self.works, self.sending = [], ()

    def computed(self, step: int) -> None:
        """The host has already done it."""

    def finish(self) -> None:
        """All has landed."""
