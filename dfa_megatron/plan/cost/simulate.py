"""Compute the cost of a plan: bytes per rank, and a timeline of its programs, run by the loop over clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.cost.outline import deliver
from dfa_megatron.plan.interpret import run_together
from dfa_megatron.plan.language.grid import cell
from dfa_megatron.plan.language.ir import AttentionPlan, Block, Plan
from dfa_megatron.plan.language.program import Call, Merge, Message, Program
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.lowering.lower import lower_all

Kind = Literal["compute", "send", "receive", "wait"]


def bytes_sent(plan: AttentionPlan | Plan, shape: AttentionShape) -> tuple[int, ...]:
    """Return the bytes that each rank sends."""
    return _bytes(plan, shape, "src")


def bytes_received(plan: AttentionPlan | Plan, shape: AttentionShape) -> tuple[int, ...]:
    """Return the bytes that each rank receives."""
    return _bytes(plan, shape, "dst")


def _bytes(plan: AttentionPlan | Plan, shape: AttentionShape, end: str) -> tuple[int, ...]:
    total = [0] * plan.ranks
    for phase in plan.phases:
        row = {name: bytes_of(name, 1, shape) for name in {transfer.what for transfer in phase.transfers}}
        for transfer in phase.transfers:
            total[getattr(transfer, end)] += row[transfer.what] * len(phase.layout.chunks[transfer.chunk])
    return tuple(total)


@dataclass(frozen=True, slots=True)
class Event:
    """An interval of a rank from `start` to `end`, in seconds. `peer` is the other end of a message, or -1."""

    rank: int
    kind: Kind
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
    def idle(self) -> tuple[float, ...]:
        """Return the idle seconds of each rank."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def utilisation(self) -> float:
        """Return compute as a share of all ranks' time."""
        return sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 1.0

    @property
    def idle_share(self) -> float:
        """Return idle time as a share of all ranks' time."""
        return 1.0 - self.utilisation

    def then(self, after: Timeline) -> Timeline:
        """Return this run followed by another, which starts when every rank is done."""
        late = self.makespan
        moved = [replace(event, start=event.start + late, end=event.end + late) for event in after.events]
        busy = tuple(map(sum, zip(self.busy, after.busy, strict=True)))
        sent = tuple(map(sum, zip(self.sent, after.sent, strict=True)))
        received = tuple(map(sum, zip(self.received, after.received, strict=True)))
        host = tuple(map(sum, zip(self.host, after.host, strict=True)))
        return Timeline(late + after.makespan, busy, sent, received, (*self.events, *moved), host)


def simulate(
    plan: AttentionPlan | Plan,
    shape: AttentionShape | None = None,
    hardware: Hardware = H200_NVLINK,
    *,
    events: bool = True,
) -> Timeline:
    """Run a plan over clocks. The programs, the loop and the order are those of a real run.

    Each rank has a compute queue and a communication queue. A step's batch starts after the previous batch and after
    the compute it waits for (`Step.after`), once both ends are ready. A rank sends one message at a time and receives
    one at a time. A step lands when its whole batch has landed. Not modelled: the slowdown of a kernel by messages
    beside it, and the memory traffic of a merge. Both phases of an AttentionPlan run one after the other. The host's
    time is a sum beside the timeline. `events` False leaves the events out, which takes half the time.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    shape = shape or AttentionShape()
    timelines = [
        simulate_programs(phase, lower_all(phase, shape.batch), shape, hardware, events=events) for phase in plan.phases
    ]
    return timelines[0] if len(timelines) == 1 else timelines[0].then(timelines[1])


def simulate_programs(
    plan: Plan, programs: Sequence[Program], shape: AttentionShape, hardware: Hardware, *, events: bool = True
) -> Timeline:
    """Simulate one phase that is lowered already."""
    network, clocks_of = Network(hardware), _Recording if events else _Clocks
    clocks = [clocks_of(plan, program, shape, hardware, network) for program in programs]
    run_together(programs, clocks)
    return Timeline(
        max((clock.done for clock in clocks), default=0.0),
        tuple(clock.busy for clock in clocks),
        bytes_sent(plan, shape),
        bytes_received(plan, shape),
        tuple(event for clock in clocks for event in clock.events),
        tuple(hardware.host.seconds(*parts_of(program)) for program in programs),
    )


def parts_of(program: Program) -> tuple[int, int, int]:
    """Return the number of kernel calls, merges and messages that a host issues; both ends of a message count."""
    steps = program.steps
    messages = sum(len(step.sends) + len(step.receives) for step in steps)
    return sum(len(step.calls) for step in steps), sum(len(step.merges) for step in steps), messages


class Network:
    """Messages between the clocks of all ranks, a step at a time."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.clocks: list[_Clocks] = []
        self.times: dict[tuple[int, int], tuple[float, float]] = {}
        self._queued: list[tuple[int, int, float, bool]] = []

    def send(self, src: int, dst: int, nbytes: int) -> None:
        """Queue a message of this step."""
        far = self.hardware.network if self.hardware.node(src) != self.hardware.node(dst) else None
        self._queued.append((src, dst, (far or self.hardware.link).seconds(nbytes), far is not None))

    def deliver(self) -> list[tuple[int, float, float]]:
        """Move all queued messages; return (rank, from, to) of each rank whose compute has to wait."""
        if not self._queued:
            return []
        delivered, self.times = deliver(self._queued, [clock.posted for clock in self.clocks])
        waits = []
        for rank in sorted({rank for src, dst, *_ in self._queued for rank in (src, dst)}):
            clock = self.clocks[rank]
            clock.delivered = delivered[rank]
            if clock.delivered > clock.done:
                waits.append((rank, clock.done, clock.delivered))
                clock.done = clock.delivered
        self._queued.clear()
        return waits


class _Clocks:
    """An algebra whose values are times: one rank's compute queue, and its end of the network."""

    def __init__(
        self, plan: Plan, program: Program, shape: AttentionShape, hardware: Hardware, network: Network
    ) -> None:
        self.plan, self.program, self.shape, self.hardware, self.network = plan, program, shape, hardware, network
        self.done = self.posted = self.delivered = 0.0
        network.clocks.append(self)
        self.flops_per_pair = shape.flops_per_pair(plan.phase)
        self.busy = 0.0
        self.step = 0
        self.ended: list[float] = []
        self.events: list[Event] = []

    def begin(self, step: int) -> None:
        """Post the step's batch once the compute it depends on is over."""
        self.step = step
        after = self.program.steps[step].after
        self.posted = max(self.delivered, self.ended[after] if after >= 0 else 0.0)

    def compute(self, call: Call) -> None:
        """Put one kernel call on the compute queue."""
        rows = (call.q if self.plan.phase.name == "forward" else call.kv).rows
        rate = self.hardware.rate(self.plan.phase.name, call.area, rows, self.shape.batch * self.shape.heads)
        self._work(self.hardware.launch_overhead + call.area * self.flops_per_pair / rate)

    def merge(self, merge: Merge) -> None:
        """Charge a merge with one kernel launch."""
        self._work(self.hardware.launch_overhead)

    def end(self, step: int) -> None:
        """Record the end of this step's compute, for the batches that wait for it."""
        self.ended.append(self.done)

    def take(self, step: int, message: Message) -> int:
        """Queue a message and return its size in bytes."""
        nbytes = sum(bytes_of(name, rows, self.shape) for name, rows in message.signature)
        self.network.send(self.program.rank, message.peer, nbytes)
        return nbytes

    def land(self, step: int, message: Message, payload: int) -> None:
        """Deliver the batches of all ranks, once per step."""
        self.network.deliver()

    def _work(self, seconds: float) -> None:
        self.done += seconds
        self.busy += seconds


class _Recording(_Clocks):
    """Clocks that write down what they count."""

    def compute(self, call: Call) -> None:
        """Record a kernel call with its blocks."""
        start, label = self.done, cell(self.plan, call.blocks)
        super().compute(call)
        self._note(self.program.rank, "compute", start, self.done, label, blocks=call.blocks)

    def merge(self, merge: Merge) -> None:
        """Record a merge, if it takes time."""
        start = self.done
        super().merge(merge)
        if self.done > start:
            self._note(self.program.rank, "compute", start, self.done, f"merge {merge.source.name}")

    def land(self, step: int, message: Message, payload: int) -> None:
        """Record who waits, and both ends of this message."""
        for rank, start, end in self.network.deliver():
            self._note(rank, "wait", start, end, "wait")
        times = self.network.times[message.peer, self.program.rank]
        label = "+".join(name for name, _ in message.signature)
        self._note(self.program.rank, "receive", *times, label, peer=message.peer, nbytes=payload)
        self._note(message.peer, "send", *times, label, peer=self.program.rank, nbytes=payload)

    def _note(self, rank: int, kind: Kind, start: float, end: float, label: str, **more: Any) -> None:
        self.events.append(Event(rank, kind, self.plan.phase.name, self.step, start, end, label, **more))
