"""Point-to-point messages over NCCL, on a communicator and a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.streams import StreamTransport
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends


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
        self.awaited[self.steps] = tuple([recv.peer for recv in receives])

    def land(self) -> None:
        with self.moving():
            for work in self.works:
                work.wait()  # the communication stream waits, not the host
        self.works, self.sending = [], ()
        super().land()
