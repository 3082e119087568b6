"""Transports: how a step's messages move while its compute runs. One batch per step, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from dfa_megatron.kernels.current_stream import current_stream
from dfa_megatron.runtime.cuda_driver import Copy


class Send(NamedTuple):
    """A message to a peer, a rank of the group.

    tensors: dense, one behind the other; with copies those that hold the rows. copies: from each, to the peer's arena.
    """

    peer: int
    tensors: Sequence[torch.Tensor]
    copies: Sequence[Copy] = ()


class Recv(NamedTuple):
    """A message from a peer, a rank of the group: the dense tensors that it fills."""

    peer: int
    tensors: Sequence[torch.Tensor]


Sends = Callable[[bool], Sequence[Send]]
"""Return what a batch sends: packed into dense tensors, on the queue of messages, or as copies from where rows lie."""


class Transport:
    """Moves the messages of one rank of one group; this one moves none, for the plan of one rank.

    Measurements wrap the methods from `start` to `finish`, which a running program calls.

    Attributes:
        queued: kernels wait in queues, so it must be told where the compute of a step ends; otherwise it need not be.
        pinned: it must not move, because a captured CUDA graph of the caller holds addresses in it.
        name: for people.
    """

    name = "none"
    queued = pinned = False

    def reserve(self, nbytes: int) -> None:
        """Have memory for a new attention; all ranks of the group say the same number."""

    def arena(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the bytes into which one run receives, as many on every rank; their content is garbage."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def where(self) -> tuple[int, tuple[int, ...]]:
        """Return the step that runs now (-1: none) and the ranks that it waits for; another thread may call this."""
        return -1, ()

    def start(self) -> None:
        """Begin a run: the inputs are ready on the caller's stream."""

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Start a step's batch once the compute of step `after` is over. A step without messages posts nothing."""

    def land(self) -> None:
        """Order the caller's compute from here on after the batch that was posted last."""

    def computed(self, step: int) -> None:
        """Note that the compute of a step has been issued."""

    def finish(self) -> None:
        """Note that the compute of the last step has been issued."""

    def release(self) -> bool:
        """Let go of what the device waits for, after a rank is lost; return whether it still waits. Of any thread."""
        return False


class _Switch:
    """A faster `torch.cuda.stream`: the stream to return to is known, and on the current device."""

    def __init__(self, to: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self.to, self.back = to, back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.to)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.back)


class StreamTransport(Transport):
    """A transport whose messages move on a stream of one device, beside the caller's stream, which computes.

    The communication stream waits for the compute that writes what it sends or reads what it overwrites (`free`). The
    compute stream waits for the batch (`filled`). Events are recorded per step; the host never waits.
    """

    queued = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.compute = device, current_stream(device)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.started, self.filled = torch.cuda.Event(), torch.cuda.Event()
        self.free: list[torch.cuda.Event] = []
        self.steps, self.awaited, self.captured = 0, dict[int, tuple[int, ...]](), False

    def start(self) -> None:
        self.compute = current_stream(self.device)
        self.captured = torch.cuda.is_current_stream_capturing()
        self.steps, self.awaited = 0, {}
        self.started.record(self.compute)
        self.stream.wait_event(self.started)

    def moving(self) -> AbstractContextManager[object]:
        """Send PyTorch's operations inside to the communication stream; valid from `start` to the end of the run."""
        if torch.cuda.current_device() != self.device.index:
            return torch.cuda.stream(self.stream)
        return _Switch(self.stream, self.compute)

    def wait_for_compute(self, after: int) -> None:
        """Hold the communication stream until the compute of that step is over; -1 is no step."""
        if after >= 0:
            self.stream.wait_event(self.free[after])

    def land(self) -> None:
        self.filled.record(self.stream)
        self.compute.wait_event(self.filled)

    def computed(self, step: int) -> None:
        while step >= len(self.free):
            self.free.append(torch.cuda.Event())
        self.free[step].record(self.compute)
        self.steps = step + 1

    def where(self) -> tuple[int, tuple[int, ...]]:
        # Events of a graph cannot be queried: CUDA raises an error, which would end the watch's thread.
        if self.captured:
            return -1, ()
        step = next((n for n, event in enumerate(self.free[: self.steps]) if not event.query()), self.steps)
        return step, self.awaited.get(step, ())
