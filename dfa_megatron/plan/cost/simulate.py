"""What a plan costs: bytes per rank, and a timeline of its programs on a machine, from the loop run over clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dfa_megatron.plan.cost.hardware import H200_NVLINK, RATED_HEADS, Hardware
from dfa_megatron.plan.cost.network import Network, Wire
from dfa_megatron.plan.interpret import run_together
from dfa_megatron.plan.language.grid import cell
from dfa_megatron.plan.language.ir import AttentionPlan, Block, Plan
from dfa_megatron.plan.language.program import Call, Merge, Message, Program
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.lowering.lower import lower_all

Kind = Literal["compute", "send", "receive", "wait"]


def bytes_sent(plan: AttentionPlan | Plan, shape: AttentionShape) -> tuple[int, ...]:
    """Bytes that each rank sends."""
    return _bytes(plan, shape, "src")


def bytes_received(plan: AttentionPlan | Plan, shape: AttentionShape) -> tuple[int, ...]:
    """Bytes that each rank receives."""
    return _bytes(plan, shape, "dst")


def _bytes(plan: AttentionPlan | Plan, shape: AttentionShape, end: str) -> tuple[int, ...]:
    total = [0] * plan.ranks
    for phase in plan.phases:
        for transfer in phase.transfers:
            tokens = len(phase.layout.chunks[transfer.chunk])
            total[getattr(transfer, end)] += bytes_of(transfer.what, tokens, shape)
    return tuple(total)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that occupies a rank from `start` to `end`, in seconds. `peer` is the other end of a message, or -1."""

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
    """A simulated run. busy: seconds of compute per rank; what is left of the makespan is idle."""

    makespan: float
    busy: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds per rank in which nothing is computed."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def utilisation(self) -> float:
        """The share of all ranks' time that is compute."""
        return sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 1.0

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time that is not."""
        return 1.0 - self.utilisation

    def then(self, after: Timeline) -> Timeline:
        """This run and then the other, which starts when every rank is done."""
        late = self.makespan
        moved = [
            Event(e.rank, e.kind, e.phase, e.step, e.start + late, e.end + late, e.label, e.peer, e.nbytes, e.blocks)
            for e in after.events
        ]
        return Timeline(
            late + after.makespan,
            tuple(a + b for a, b in zip(self.busy, after.busy, strict=True)),
            tuple(a + b for a, b in zip(self.sent, after.sent, strict=True)),
            tuple(a + b for a, b in zip(self.received, after.received, strict=True)),
            (*self.events, *moved),
        )


def simulate(
    plan: AttentionPlan | Plan, shape: AttentionShape | None = None, hardware: Hardware = H200_NVLINK
) -> Timeline:
    """Run a plan over clocks: the programs, the loop and the order are those of a real run.

    Each rank has a compute queue and a communication queue. A step's batch starts when the previous one is over, the
    compute it must wait for (`Step.after`) is over, and the other end is as far; a rank sends one message at a time and
    receives one at a time. A step lands when the whole batch has. Not modelled: what moving bytes takes from the kernel
    beside it, and the memory traffic of a merge. Both phases of an AttentionPlan run one after the other.

    Raises:
        PlanError: the plan breaks a rule of the language.
    """
    shape = shape or AttentionShape()
    timelines = [simulate_programs(phase, lower_all(phase, shape.batch), shape, hardware) for phase in plan.phases]
    return timelines[0] if len(timelines) == 1 else timelines[0].then(timelines[1])


def simulate_programs(plan: Plan, programs: Sequence[Program], shape: AttentionShape, hardware: Hardware) -> Timeline:
    """`simulate` for one phase that is lowered already."""
    network = Network(hardware)
    clocks = [_Clocks(plan, program, shape, hardware, network) for program in programs]
    run_together(programs, clocks)
    return Timeline(
        max((clock.wire.done for clock in clocks), default=0.0),
        tuple(clock.busy for clock in clocks),
        bytes_sent(plan, shape),
        bytes_received(plan, shape),
        tuple(event for clock in clocks for event in clock.events),
    )


class _Clocks:
    """The algebra whose values are times: one rank's compute queue, and its end of the network."""

    def __init__(
        self, plan: Plan, program: Program, shape: AttentionShape, hardware: Hardware, network: Network
    ) -> None:
        self.plan, self.program, self.shape, self.hardware, self.network = plan, program, shape, hardware, network
        self.wire = Wire()
        network.wires.append(self.wire)
        self.flops_per_pair = shape.flops_per_pair(plan.phase)
        self.busy = 0.0
        self.step = 0
        self.ended: list[float] = []
        self.events: list[Event] = []

    def begin(self, step: int) -> None:
        """Post the step's batch as soon as the compute it depends on is over."""
        self.step = step
        after = self.program.steps[step].after
        self.wire.post(self.ended[after] if after >= 0 else 0.0)

    def open(self, buffer: int) -> None:
        """Free of charge beside a kernel call."""

    def compute(self, call: Call) -> None:
        """One kernel call on the compute queue."""
        label = cell(self.plan, call.blocks)
        rate = self.hardware.rate(self.plan.phase.name, call.area * self.shape.batch * self.shape.heads / RATED_HEADS)
        self._work(self.hardware.launch_overhead + call.area * self.flops_per_pair / rate, label, call.blocks)

    def merge(self, merge: Merge) -> None:
        """A merge costs its launch."""
        if self.hardware.launch_overhead:
            self._work(self.hardware.launch_overhead, f"merge {merge.source.name}", ())

    def end(self, step: int) -> None:
        """What waits for this step's compute may go from here on."""
        self.ended.append(self.wire.done)

    def take(self, step: int, message: Message) -> int:
        """Queue a message; its size is its payload."""
        nbytes = sum(bytes_of(name, rows, self.shape) for name, rows in message.signature)
        self.network.send(self.program.rank, message.peer, nbytes)
        return nbytes

    def land(self, step: int, message: Message, payload: int) -> None:
        """Deliver the batches of all ranks, once per step, and note both ends of this message."""
        for rank, start, end in self.network.deliver():
            self._note_wait(rank, start, end)
        start, end = self.network.times[message.peer, self.program.rank]
        label = "+".join(name for name, _ in message.signature)
        phase, me = self.plan.phase.name, self.program.rank
        self.events.append(Event(me, "receive", phase, step, start, end, label, message.peer, payload))
        self.events.append(Event(message.peer, "send", phase, step, start, end, label, me, payload))

    def _note_wait(self, rank: int, start: float, end: float) -> None:
        self.events.append(Event(rank, "wait", self.plan.phase.name, self.step, start, end, "wait"))

    def _work(self, seconds: float, label: str, blocks: tuple[Block, ...]) -> None:
        start, self.wire.done = self.wire.done, self.wire.done + seconds
        self.busy += seconds
        self.events.append(
            Event(
                self.program.rank,
                "compute",
                self.plan.phase.name,
                self.step,
                start,
                self.wire.done,
                label,
                blocks=blocks,
            )
        )
