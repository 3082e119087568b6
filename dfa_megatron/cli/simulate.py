"""Run a plan's programs over clocks, for pictures and reports, and as the test of `outline`; count its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dfa_megatron.plan.cost.choose import deliver
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.interpret import run_together
from dfa_megatron.plan.language.grid import cell
from dfa_megatron.plan.language.ir import AttentionPlan, Block, Plan
from dfa_megatron.plan.language.program import Call, Merge, Message, Program, rows_read
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.lower import lower_all


def bytes_sent(plan: AttentionPlan | Plan, sizes: Sizes, end: str = "src") -> tuple[int, ...]:
    """Return the bytes that each rank sends, or with end="dst" those that it receives."""
    total = [0] * plan.ranks
    for phase in plan.phases:
        for transfer in phase.transfers:
            total[getattr(transfer, end)] += len(phase.layout.chunks[transfer.chunk]) * sum(
                sizes.row_bytes(transfer.what)
            )
    return tuple(total)


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a rank from `start` to `end`, in seconds. `peer` is the other end of a message, or -1."""

    rank: int
    kind: Literal["compute", "send", "receive", "wait"]
    phase: str
    step: int
    start: float
    end: float
    label: str
    peer: int = -1
    nbytes: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated run of the devices. busy: seconds of compute per rank; the rest of the makespan is idle.

    host: seconds that each rank's host takes to issue the run.
    """

    makespan: float
    busy: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    events: tuple[Event, ...]
    host: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the time of a run among others like it: a host issues the next run while its device computes."""
        return max((self.makespan, *self.host))

    @property
    def idle_share(self) -> float:
        """Return idle time as a share of all ranks' time."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    def then(self, after: Timeline) -> Timeline:
        """Return this run followed by another, which starts when every rank is done."""
        late = self.makespan
        moved = [replace(event, start=event.start + late, end=event.end + late) for event in after.events]
        busy = tuple(map(sum, zip(self.busy, after.busy, strict=True)))
        sent = tuple(map(sum, zip(self.sent, after.sent, strict=True)))
        received = tuple(map(sum, zip(self.received, after.received, strict=True)))
        host = tuple(map(sum, zip(self.host, after.host, strict=True)))
        return Timeline(late + after.makespan, busy, sent, received, (*self.events, *moved), host)


def simulate(plan: AttentionPlan | Plan, sizes: Sizes | None = None, hardware: Hardware = H200_NVLINK) -> Timeline:
    """Run a plan over clocks. The programs, the loop and the order are those of a real run.

    Each rank has a compute queue and a communication queue. A step's batch starts after the previous batch and after
    the compute it waits for (`Step.after`), once both ends are ready. A rank sends one message at a time and receives
    one at a time. A step lands when its whole batch has landed. Not modelled: the slowdown of a kernel by messages
    beside it, and the memory traffic of a merge. Both phases of an AttentionPlan run one after the other. The host's
    time is a sum beside the timeline.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    timelines = [_simulate(phase, sizes or Sizes(), hardware) for phase in plan.phases]
    return timelines[0] if len(timelines) == 1 else timelines[0].then(timelines[1])


def _simulate(plan: Plan, sizes: Sizes, hardware: Hardware) -> Timeline:
    programs, clocks, events = lower_all(plan, sizes.batch), list[_Clock](), list[Event]()
    network = _Network(hardware, clocks)
    clocks += [_Clock(plan, program, sizes, network, events) for program in programs]
    run_together(programs, clocks)
    return Timeline(
        max((clock.done for clock in clocks), default=0.0),
        tuple(clock.busy for clock in clocks),
        bytes_sent(plan, sizes),
        bytes_sent(plan, sizes, "dst"),
        tuple(events),
        tuple(hardware.host.seconds(*parts_of(program)) for program in programs),
    )


def parts_of(program: Program) -> tuple[int, int, int]:
    """Return the number of kernel calls, merges and messages that a host issues; both ends of a message count."""
    steps = program.steps
    messages = sum(len(step.sends) + len(step.receives) for step in steps)
    return sum(len(step.calls) for step in steps), sum(len(step.merges) for step in steps), messages


class _Network:
    """Messages between the clocks of all ranks, a step at a time. times: by source and destination."""

    def __init__(self, hardware: Hardware, clocks: list[_Clock]) -> None:
        self.hardware, self.clocks = hardware, clocks
        self.times: dict[tuple[int, int], tuple[float, float]] = {}
        self.queued: list[tuple[int, int, float, bool]] = []

    def send(self, src: int, dst: int, nbytes: int) -> None:
        far = self.hardware.network if self.hardware.node(src) != self.hardware.node(dst) else None
        self.queued.append((src, dst, (far or self.hardware.link).seconds(nbytes), far is not None))

    def deliver(self) -> None:
        """Move all queued messages; the compute of both ends waits for them."""
        if self.queued:
            delivered, self.times = deliver(self.queued, [clock.posted for clock in self.clocks])
            for rank in sorted({rank for src, dst, *_ in self.queued for rank in (src, dst)}):
                self.clocks[rank].wait(delivered[rank])
            self.queued.clear()


class _Clock:
    """An algebra whose values are times: one rank's compute queue, and its end of the network."""

    def __init__(self, plan: Plan, program: Program, sizes: Sizes, network: _Network, events: list[Event]) -> None:
        self.plan, self.program, self.sizes, self.network, self.events = plan, program, sizes, network, events
        self.done = self.posted = self.delivered = self.busy = 0.0
        self.step, self.ended = 0, list[float]()

    def begin(self, step: int) -> None:
        """Post the step's batch once the compute it depends on is over."""
        self.step, after = step, self.program.steps[step].after
        self.posted = max(self.delivered, self.ended[after] if after >= 0 else 0.0)

    def compute(self, call: Call) -> None:
        """Put one kernel call on the compute queue."""
        phase, heads = self.plan.phase, self.sizes.batch * self.sizes.heads
        rate = self.network.hardware.rate(phase.name, call.area, rows_read(call.segments), call.kv.rows, heads)
        seconds = call.area * self.sizes.flops_per_pair(phase) / rate
        self._work(seconds, cell(self.plan, call.blocks), blocks=call.blocks)

    def merge(self, merge: Merge) -> None:
        """Charge a merge with one kernel launch."""
        self._work(0.0, f"merge {merge.source.name}")

    def end(self, step: int) -> None:
        """Note the end of this step's compute, for the batches that wait for it."""
        self.ended.append(self.done)

    def take(self, step: int, message: Message) -> int:
        """Queue a message and return its size in bytes."""
        nbytes = sum(rows * sum(self.sizes.row_bytes(name)) for name, rows in message.signature)
        self.network.send(self.program.rank, message.peer, nbytes)
        return nbytes

    def land(self, step: int, message: Message, payload: int) -> None:
        """Deliver the batches of all ranks, once per step, and note both ends of this message."""
        self.network.deliver()
        rank, label = self.program.rank, "+".join(name for name, _ in message.signature)
        times = self.network.times[message.peer, rank]
        for kind, one, other in (("receive", rank, message.peer), ("send", message.peer, rank)):
            self._note(one, kind, *times, label, peer=other, nbytes=payload)

    def wait(self, delivered: float) -> None:
        """Let compute wait for the end of this step's batch."""
        self.delivered = delivered
        if delivered > self.done:
            self._note(self.program.rank, "wait", self.done, delivered, "wait")
            self.done = delivered

    def _work(self, seconds: float, label: str, **more: Any) -> None:
        seconds += self.network.hardware.launch_overhead
        if seconds:
            self._note(self.program.rank, "compute", self.done, self.done + seconds, label, **more)
        self.done += seconds
        self.busy += seconds

    def _note(self, rank: int, kind: Any, start: float, end: float, label: str, **more: Any) -> None:
        self.events.append(Event(rank, kind, self.plan.phase.name, self.step, start, end, label, **more))
