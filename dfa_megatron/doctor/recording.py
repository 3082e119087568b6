"""Record a real run: the times of each kernel call, merge and batch of messages, in the form of the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch

from dfa_megatron.doctor.stopwatch import Mark, mark, seconds_between
from dfa_megatron.plan.cost.simulate import Event, Timeline
from dfa_megatron.plan.interpret import Algebra
from dfa_megatron.plan.language.grid import cell
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Merge
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.transport import Moving, Recv, Send, Sends, StepTransport
from dfa_megatron.runtime.hooks import Run, hooked


@dataclass
class Recording:
    """The record of one rank's forward and backward, in the order of issue."""

    spans: list[tuple[str, str, int, str, int, int, Mark, Mark]] = field(default_factory=list)
    """(kind, phase, step, label, peer, bytes, start, end)"""
    name = "recording"

    def wrap(self, run: Run) -> tuple[Algebra, StepTransport]:
        """Wrap a run, see `Hook`."""
        marked = _RecordedRun(run, self)
        return marked, marked

    def events(self, phase: str, rank: int) -> list[Event]:
        """Return the events of a phase, in seconds after its first event; wait for the device."""
        spans = [span for span in self.spans if span[1] == phase]
        if not spans:
            return []
        first = spans[0][6]
        return [
            Event(rank, kind, phase, step, seconds_between(first, start), seconds_between(first, end), *rest)  # type: ignore[arg-type]
            for kind, _, step, *rest, start, end in spans
        ]


@contextmanager
def record() -> Iterator[Recording]:
    """Record the distributed attentions of this process inside; the marks cost some host time and no device time."""
    recording = Recording()
    with hooked(recording):
        yield recording


def gathered(recording: Recording, plan: Plan, channel: Channel | None) -> Timeline:
    """Return the record of all ranks in one phase of a plan, each from its own first mark on; collective."""
    rank = channel.rank if channel else 0
    told = {"events": json.dumps([astuple(event)[:-1] for event in recording.events(plan.phase.name, rank)])}
    everyone = [told] if channel is None else channel.exchange(told, "show what they have recorded")
    events = tuple(Event(*values) for facts in everyone for values in json.loads(facts["events"]))

    def total(value: Callable[[Event], float], kind: str) -> list[float]:
        return [sum(value(e) for e in events if e.rank == r and e.kind == kind) for r in range(plan.ranks)]

    return Timeline(
        max((event.end for event in events), default=0.0),
        tuple(total(lambda e: e.end - e.start, "compute")),
        tuple(map(int, total(lambda e: e.nbytes, "send"))),
        tuple(map(int, total(lambda e: e.nbytes, "receive"))),
        events,
    )


class _RecordedRun:
    """The algebra and the transport of one run, with a mark before and after each call, merge and batch."""

    def __init__(self, run: Run, recording: Recording) -> None:
        self.run, self.spans, self.step = run, recording.spans, 0
        streams = getattr(run.transport, "streams", None)
        self.stream: torch.cuda.Stream | None = None if streams is None else streams.stream
        self.posted: Mark = None

    # The algebra.

    def begin(self, step: int) -> None:
        self.step = step
        self.run.algebra.begin(step)

    def compute(self, call: Call) -> None:
        start = self._mark()
        self.run.algebra.compute(call)
        self._note("compute", cell(self.run.plan, call.blocks), start, self._mark())

    def merge(self, merge: Merge) -> None:
        start = self._mark()
        self.run.algebra.merge(merge)
        self._note("compute", f"merge {merge.source.name}", start, self._mark())

    def end(self, step: int) -> None:
        self.run.algebra.end(step)

    # The transport.

    def start(self) -> None:
        self.run.transport.start()

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Mark the time when the batch may leave: the transport asks for the tensors to send then."""

        def marked(moving: Moving) -> Sequence[Send]:
            self.posted = self._mark(self.stream)
            return sends(moving)

        self.run.transport.post(after, marked, receives)

    def land(self) -> None:
        self.run.transport.land()
        end, sizes = self._mark(self.stream), self.run.tensors.format
        step = self.run.tensors.program.steps[self.step]
        for kind, messages in (("send", step.sends), ("receive", step.receives)):
            for message in messages:
                label = "+".join(name for name, _ in message.signature)
                self._note(kind, label, self.posted, end, message.peer, sizes.nbytes(message.signature))

    def computed(self, step: int) -> None:
        self.run.transport.computed(step)

    def finish(self) -> None:
        self.run.transport.finish()

    def _mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Return the time on a stream, by default the current one."""
        return mark(self.run.tensors.device, stream)

    def _note(self, kind: str, label: str, start: Mark, end: Mark, peer: int = -1, nbytes: int = 0) -> None:
        self.spans.append((kind, self.run.plan.phase.name, self.step, label, peer, nbytes, start, end))
