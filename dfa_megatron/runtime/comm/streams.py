"""The stream on which messages move, and the events between it and the stream that computes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


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
