"""The stream on which messages move, and the events between it and the stream that computes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from dfa_megatron.kernels.current_stream import current_stream
from dfa_megatron.runtime.comm.transport import Transport


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
        if Transport.mark:
            Transport.mark()
        self.compute.wait_event(self.filled)
        if Transport.mark:
            Transport.mark()

    def computed(self, step: int) -> None:
        while step >= len(self.free):
            self.free.append(torch.cuda.Event())
        self.free[step].record(self.compute)
        self.steps = step + 1

    def where(self) -> tuple[int, tuple[int, ...]]:
        # Events of a graph cannot be queried: CUDA raises an error, which would end the watchdog's thread.
        if self.captured:
            return -1, ()
        step = next((n for n, event in enumerate(self.free[: self.steps]) if not event.query()), self.steps)
        peers = self.awaited.get(step, ())
        return step, tuple(self.ranks[peer] for peer in peers) if self.ranks else peers
