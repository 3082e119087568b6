"""Record a real run: when each kernel call, merge and batch of messages ran, in the form that the simulator gives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dfa_megatron.plan.cost.simulate import Event, Timeline
from dfa_megatron.plan.language.grid import cell
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Merge, Message
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.communicator import Parcel
from dfa_megatron.runtime.comm.transport import Around, Transport
from dfa_megatron.runtime.execute.tensors import Tensors
from dfa_megatron.runtime.hooks import hooked

Mark = Any
"""A CUDA event on its stream, or seconds of the host's clock."""


@dataclass
class Recording:
    """What one rank did in one forward and one backward, in the order in which it was issued."""

    spans: list[tuple[str, str, int, str, int, int, Mark, Mark]] = field(default_factory=list)
    """(kind, phase, step, label, peer, bytes, start, end)"""
    name = "recording"

    def algebra(self, algebra: Tensors, plan: Plan) -> Tensors:
        """See `Hook`."""
        return RecordedTensors(algebra, plan, self)

    def transport(self, transport: Transport, algebra: Tensors) -> Transport:
        """See `Hook`."""
        assert isinstance(algebra, RecordedTensors)
        return RecordedTransport(transport, algebra)

    def events(self, phase: str, rank: int) -> list[Event]:
        """What happened in a phase, in seconds after the first thing in it; waits for the device."""
        spans = [span for span in self.spans if span[1] == phase]
        if not spans:
            return []
        first = spans[0][6]
        return [
            Event(rank, kind, phase, step, _seconds(first, start), _seconds(first, end), label, peer, nbytes)  # type: ignore[arg-type]
            for kind, _, step, label, peer, nbytes, start, end in spans
        ]


@contextmanager
def record() -> Iterator[Recording]:
    """Record the distributed attentions of this process inside; the marks cost some host time and no device time."""
    recording = Recording()
    with hooked(recording):
        yield recording


def gathered(recording: Recording, plan: Plan, channel: Channel | None) -> Timeline:
    """What all ranks did in one phase of a plan, each from its own first mark on; collective."""
    rank = channel.rank if channel else 0
    mine = [
        [e.kind, e.step, e.start, e.end, e.label, e.peer, e.nbytes] for e in recording.events(plan.phase.name, rank)
    ]
    told = {"events": json.dumps(mine)}
    everyone = [told] if channel is None else channel.exchange(told, "show what they have recorded")
    events = tuple(
        Event(rank, kind, plan.phase.name, step, start, end, label, peer, nbytes)
        for rank, facts in enumerate(everyone)
        for kind, step, start, end, label, peer, nbytes in json.loads(facts["events"])
    )

    def total(value: Callable[[Event], float], kind: str) -> list[float]:
        return [sum(value(e) for e in events if e.rank == r and e.kind == kind) for r in range(plan.ranks)]

    return Timeline(
        max((event.end for event in events), default=0.0),
        tuple(total(lambda e: e.end - e.start, "compute")),
        tuple(map(int, total(lambda e: e.nbytes, "send"))),
        tuple(map(int, total(lambda e: e.nbytes, "receive"))),
        events,
    )


class RecordedTensors(Tensors):
    """The algebra with a mark before and after each kernel call and merge."""

    def __init__(self, algebra: Tensors, plan: Plan, recording: Recording) -> None:
        self.__dict__.update(algebra.__dict__)
        self.plan, self.recording, self.step = plan, recording, 0

    def begin(self, step: int) -> None:
        """Remember the step."""
        self.step = step

    def compute(self, call: Call) -> None:
        """See `Tensors.compute`."""
        start = self.mark()
        super().compute(call)
        self.note("compute", cell(self.plan, call.blocks), start, self.mark())

    def merge(self, merge: Merge) -> None:
        """See `Tensors.merge`."""
        start = self.mark()
        super().merge(merge)
        self.note("compute", f"merge {merge.source.name}", start, self.mark())

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Now, on a stream: the current one if none is given."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream if stream is not None else torch.cuda.current_stream(self.device))
        return event

    def note(self, kind: str, label: str, start: Mark, end: Mark, peer: int = -1, nbytes: int = 0) -> None:
        """Add a span of this step."""
        phase = self.program.phase.name
        self.recording.spans.append((kind, phase, self.step, label, peer, nbytes, start, end))


class RecordedTransport(Around):
    """A transport with a mark where each batch was let go, and where it had landed."""

    def __init__(self, inner: Transport, algebra: RecordedTensors) -> None:
        super().__init__(inner)
        self.algebra = algebra
        streams = getattr(inner, "streams", None)
        self.stream: torch.cuda.Stream | None = None if streams is None else streams.stream
        self.start_mark: Mark = None

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """See `Transport`: the mark comes once the batch may go."""

        def marked() -> Sequence[Parcel]:
            self.start_mark = self.algebra.mark(self.stream)
            return sends()

        self.inner.post(after, marked, receives)

    def land(self) -> None:
        """See `Transport`."""
        self.inner.land()
        end, step = self.algebra.mark(self.stream), self.algebra.program.steps[self.algebra.step]
        for kind, messages in (("send", step.sends), ("receive", step.receives)):
            for message in messages:
                self._note(kind, message, end)

    def _note(self, kind: str, message: Message, end: Mark) -> None:
        label = "+".join(name for name, _ in message.signature)
        nbytes = self.algebra.format.nbytes(message.signature)
        self.algebra.note(kind, label, self.start_mark, end, message.peer, nbytes)


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
