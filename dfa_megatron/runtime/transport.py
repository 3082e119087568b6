"""Transports: how a step's messages move while its compute runs. One symmetric batch per step, one message per peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Parcel = tuple[int, torch.Tensor]
"""(group rank of the peer, a contiguous tensor of bytes)."""


class Transport(Protocol):
    """Moves the messages of one rank of one group."""

    def start(self) -> None:
        """The inputs are ready on the caller's stream."""
        ...

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Start a step's batch once the compute of step `after` is over; `sends` packs, on the transport's queue."""
        ...

    def land(self) -> None:
        """The caller's compute from here on comes after the batch that was posted last."""
        ...

    def computed(self, step: int) -> None:
        """The compute of a step has been issued."""
        ...


def _batch(group: dist.ProcessGroup, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[dist.Work]:
    # A peer is a rank of the group; point-to-point calls take global ranks.
    operations = [dist.P2POp(dist.irecv, flat, dist.get_global_rank(group, peer), group) for peer, flat in receives]
    operations += [dist.P2POp(dist.isend, flat, dist.get_global_rank(group, peer), group) for peer, flat in sends]
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


class GlooTransport:
    """Point-to-point over gloo: the host waits where a step lands."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.works: list[dist.Work] = []

    def start(self) -> None:
        """Nothing runs behind the host's back on a CPU."""

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Start the batch; the peers' threads move it during compute."""
        self.works = _batch(self.group, sends(), receives)

    def land(self) -> None:
        """Wait for the batch."""
        for work in self.works:
            work.wait()
        self.works = []

    def computed(self, step: int) -> None:
        """The host has already done it."""


class NcclTransport:
    """Point-to-point over NCCL on a communicator and a stream of its own; the host waits for nothing.

    The communication stream waits for the compute that wrote what is sent, or read what is overwritten (`free`); the
    compute stream waits for the batch (`filled`). Both are events, recorded per step.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.started = torch.cuda.Event()
        self.filled = torch.cuda.Event()
        self.free: dict[int, torch.cuda.Event] = {}
        self.works: list[dist.Work] = []

    def start(self) -> None:
        """Nothing moves before the inputs are there."""
        self.started.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self.started)

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Queue the batch on the communication stream."""
        with torch.cuda.stream(self.stream):
            if after >= 0:
                self.stream.wait_event(self.free[after])
            self.works = _batch(self.group, sends(), receives)

    def land(self) -> None:
        """Queue the wait of the compute stream."""
        with torch.cuda.stream(self.stream):
            for work in self.works:
                work.wait()  # the communication stream waits, not the host
        self.works = []
        self.filled.record(self.stream)
        torch.cuda.current_stream(self.device).wait_event(self.filled)

    def computed(self, step: int) -> None:
        """Remember where the step's compute ends."""
        event = self.free.setdefault(step, torch.cuda.Event())
        event.record(torch.cuda.current_stream(self.device))
