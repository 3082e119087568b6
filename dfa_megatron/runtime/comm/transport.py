"""Transports: how a step's messages move while its compute runs. One symmetric batch per step, in one order on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.arena import Arena
from dfa_megatron.runtime.comm.communicator import Communicator, Parcel


class Transport(Protocol):
    """Moves the messages of one rank of one group.

    generation: changes when what was reserved before is no longer there.
    """

    generation: int

    def reserve(self, nbytes: int) -> None:
        """Arenas of this size will be wanted: called at set-up, by all ranks of the group with the same number."""
        ...

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Memory for what lands in one run, as much on every rank; what it holds is garbage."""
        ...

    def start(self) -> None:
        """The inputs are ready on the caller's stream."""
        ...

    def where(self) -> tuple[int, tuple[int, ...]]:
        """The step that runs now, and the ranks that it waits for; another thread may ask."""
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

    def finish(self) -> None:
        """The compute of the last step has been issued."""
        ...


class GlooTransport:
    """Point-to-point over gloo: the host waits where a step lands."""

    generation = 0

    def __init__(self, communicator: Communicator, wait: Callable[[Callable[[], object]], None]) -> None:
        """`wait` waits for what blocks, and raises where that has become pointless."""
        self._communicator, self._wait = communicator, wait
        self._where: tuple[int, tuple[int, ...]] = (-1, ())
        self.works: list[dist.Work] = []
        self.sending: Sequence[Parcel] = ()

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

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Start the batch; the peers' threads move it during compute."""
        self.sending = sends()
        self._where = self._where[0] + 1, tuple(parcel.peer for parcel in receives)
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


class _Switch:
    """`torch.cuda.stream` where the stream to come back to is known and of the current device: it asks for neither."""

    def __init__(self, to: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self.to, self.back = to, back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.to)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.back)


class Streams:
    """The events between the caller's stream, which computes, and a stream of our own, which moves.

    The communication stream waits for the compute that wrote what is sent, or read what is overwritten (`free`); the
    compute stream waits for the batch (`filled`). Both are events, recorded per step; the host waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.started, self.filled = torch.cuda.Event(), torch.cuda.Event()
        self.free: list[torch.cuda.Event] = []
        self.steps, self.awaited = 0, list[tuple[int, ...]]()
        self.compute = torch.cuda.current_stream(device)

    def start(self) -> None:
        """Nothing moves before the inputs are there, which the caller's stream computes."""
        self.compute = torch.cuda.current_stream(self.device)
        self.steps, self.awaited = 0, []
        self.started.record(self.compute)
        self.stream.wait_event(self.started)

    def moving(self) -> AbstractContextManager[object]:
        """PyTorch's operations inside go to the communication stream. Between `start` and the call's end."""
        if torch.cuda.current_device() != self.device.index:
            return torch.cuda.stream(self.stream)
        return _Switch(self.stream, self.compute)

    def wait_for_compute(self, after: int) -> None:
        """The communication stream goes on once the compute of that step is over."""
        if after >= 0:
            self.stream.wait_event(self.free[after])

    def land(self) -> None:
        """The compute stream goes on once all is moved."""
        self.filled.record(self.stream)
        self.compute.wait_event(self.filled)

    def computed(self, step: int) -> None:
        """Remember where the step's compute ends."""
        while step >= len(self.free):
            self.free.append(torch.cuda.Event())
        self.free[step].record(self.compute)
        self.steps = step + 1

    def where(self) -> tuple[int, tuple[int, ...]]:
        """The first step whose compute is not over, and the ranks that its messages come from."""
        step = next((n for n, event in enumerate(self.free[: self.steps]) if not event.query()), self.steps)
        return step, self.awaited[step] if step < len(self.awaited) else ()


class NcclTransport:
    """Point-to-point over NCCL on a communicator and a stream of its own; the host waits for nothing."""

    generation = 0

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self.streams = communicator, Streams(device)
        self.works: list[dist.Work] = []
        self.sending: Sequence[Parcel] = ()

    def reserve(self, nbytes: int) -> None:
        """Each call takes its memory from PyTorch's allocator."""

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Memory of the call's own, from PyTorch's allocator."""
        return Arena.allocate(nbytes, device)

    def start(self) -> None:
        """See `Streams.start`."""
        self.streams.start()

    def where(self) -> tuple[int, tuple[int, ...]]:
        """See `Streams.where`."""
        return self.streams.where()

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Queue the batch on the communication stream."""
        with self.streams.moving():
            self.streams.wait_for_compute(after)
            self.sending = sends()
            self.works = self._communicator.post(self.sending, receives)
        self.streams.awaited.append(tuple(parcel.peer for parcel in receives))

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
        """All has landed, as far as the streams are concerned."""


class Around:
    """A transport that does what another does; what wraps one for a purpose changes the methods that matter to it."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.generation = inner, inner.generation

    def reserve(self, nbytes: int) -> None:
        """See `Transport`."""
        self.inner.reserve(nbytes)

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """See `Transport`."""
        return self.inner.arena(nbytes, device)

    def start(self) -> None:
        """See `Transport`."""
        self.inner.start()

    def where(self) -> tuple[int, tuple[int, ...]]:
        """See `Transport`."""
        return self.inner.where()

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """See `Transport`."""
        self.inner.post(after, sends, receives)

    def land(self) -> None:
        """See `Transport`."""
        self.inner.land()

    def computed(self, step: int) -> None:
        """See `Transport`."""
        self.inner.computed(step)

    def finish(self) -> None:
        """See `Transport`."""
        self.inner.finish()
