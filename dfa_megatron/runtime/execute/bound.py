"""A bound program: what a run of one rank's program does to tensors and messages, recorded once, then replayed.

The recorded run is a real one: the one loop drives it over the checked program. A replay looks nothing up. It issues
the same operations, with allocations moved later and memory freed earlier. No proof covers that order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from dfa_megatron.errors import ExecutionError
from dfa_megatron.kernels.tape import Op, Registers, Tape, unrecorded
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, Transport
from dfa_megatron.runtime.cuda_driver import Copy
from dfa_megatron.runtime.execute.memory import Fields


class OpFailed(Exception):  # noqa: N818
    """The operation at this place of a replay raised this error."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at)
        self.at, self.error = at, error


def replay(ops: Sequence[Op], registers: Registers) -> None:
    """Run operations on registers; an error of one is raised as an OpFailed, with its place."""
    read, at = registers.__getitem__, 0
    try:
        for at, (function, reads, writes, frees, _) in enumerate(ops):  # noqa: B007
            registers[writes] = function(*map(read, reads))
            for register in frees:
                registers[register] = None
    except Exception as error:
        raise OpFailed(at, error) from error


def allocating_late(ops: Sequence[Op], starts: Sequence[int] = ()) -> list[Op]:
    """Return the same operations, each allocation right before the first that reads it.

    A kernel's package allocates its results first, its workspaces next, and fills the results last.

    starts: where parts of the operations begin; each operation stays in its part.
    """
    found, waiting, edges = list[Op](), dict[int, Op](), {*starts}
    for at, op in enumerate(ops):
        if at in edges:
            found += waiting.values()
            waiting.clear()
        if isinstance(op.function, partial) and op.function.func is torch.empty_strided:
            waiting[op.writes] = op
            continue
        found += [waiting.pop(register) for register in (*op.reads, *op.holds) if register in waiting]
        found.append(op)
    return [*found, *waiting.values()]


def freeing(ops: Sequence[Op], written: set[int], *, kept: frozenset[int]) -> list[Op]:
    """Return the same operations, with each register that they write freed after its last use.

    written: other registers that are freed: the operations only read them. kept: those that are not.
    """
    last = {register: at for at, op in enumerate(ops) for register in (*op.reads, op.writes, *op.holds)}
    frees: dict[int, list[int]] = {}
    for register in sorted(({op.writes for op in ops} | written) & last.keys() - kept):
        frees.setdefault(last[register], []).append(register)
    return [
        Op(function, reads, writes, tuple(frees.get(at, ())), holds)
        for at, (function, reads, writes, _, holds) in enumerate(ops)
    ]


Failed = Callable[[int, Exception], ExecutionError]
"""Return the error to raise where a step failed."""


@dataclass(frozen=True, slots=True)
class Post:
    """The batch of a step.

    sends: peer, the registers of the message's tensors, and the copies. receives: peer, and the registers of the memory
    that the message lands in. packing: operations that make what is sent, on the transport's
    queue.
    """

    after: int
    sends: tuple[tuple[int, tuple[int, ...], Sequence[Copy]], ...]
    receives: tuple[tuple[int, tuple[int, ...]], ...]
    packing: tuple[Op, ...]

    def __call__(self, transport: Transport, registers: Registers) -> None:
        """Post the batch."""
        receives, read = [], registers.__getitem__
        for peer, where in self.receives:
            receives.append(Recv(peer, list(map(read, where))))
        transport.post(self.after, partial(self._sends, registers), receives)

    def _sends(self, registers: Registers, packed: bool) -> list[Send]:
        if packed and self.packing:
            replay(self.packing, registers)
        sends, read = [], registers.__getitem__
        for peer, where, copies in self.sends:
            sends.append(Send(peer, list(map(read, where)), copies))
        return sends

    @property
    def touched(self) -> tuple[int, ...]:
        """The registers that must live until the batch has landed."""
        posted = [where for _, where, _ in self.sends] + [where for _, where in self.receives]
        packed = [(*op.reads, op.writes) for op in self.packing]
        return tuple(dict.fromkeys(x for registers in posted + packed for x in registers))


class Recorder(Transport):
    """A transport that puts what passes through it on the tape that records the run around it.

    What passes to a transport that moves nothing is left out. arena: the register of the memory that receives messages.
    """

    def __init__(self, tape: Tape, transport: Transport, arena: int) -> None:
        self.tape, self.transport, self.received = tape, transport, arena
        self._moves = type(transport) is not Transport
        self.own, self.all = tape.reserve(), tape.reserve()
        """The registers that hold, in a replay, its transport and the list of its registers."""
        self.steps: list[int] = []
        """Where in the operations the compute of each step ends."""
        self._posted: tuple[int, ...] = ()

    def start(self) -> None:
        self._pass_on("start")

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Post the batch, and record the packing apart."""
        tape = self.tape
        if not self._moves:
            return
        landing = tuple((r.peer, tuple(map(tape.register, r.tensors))) for r in receives)
        before = tape.cut()
        bound: list[tuple[int, tuple[int, ...], Sequence[Copy]]] = []

        def recorded(packed: bool) -> Sequence[Send]:
            with tape:
                found = sends(packed)
            bound.extend((s.peer, tuple(map(tape.register, s.tensors)), s.copies) for s in found)
            return found

        with unrecorded():
            self.transport.post(after, recorded, receives)
        packing, packed = list[Op](), set[int]()
        for op in tape.cut():
            if op.function in (torch.as_strided, torch.Tensor.view) and op.reads[0] not in packed:
                before.append(op)  # of what was there before; kernels may read the same view
            else:
                packing.append(op)
                packed.add(op.writes)
        post = Post(after, tuple(bound), landing, tuple(packing))
        tape.ops = before
        self._posted = post.touched
        tape.record_call(post, (self.own, self.all), holds=self._posted)

    def land(self) -> None:
        self._pass_on("land", holds=self._posted)

    def computed(self, step: int) -> None:
        self.steps.append(len(self.tape.ops))
        if self.transport.queued:
            self._pass_on("computed", step)

    def finish(self) -> None:
        if self.transport.queued:
            self._pass_on("finish")

    def _pass_on(self, method: str, *args: Any, holds: tuple[int, ...] = ()) -> None:
        if not self._moves:
            return
        call = methodcaller(method, *args)
        with unrecorded():
            call(self.transport)
        self.tape.record_call(call, (self.own,), holds)


class Bound:
    """A recorded run of one phase, which returned these results."""

    def __init__(self, recorder: Recorder, results: Fields) -> None:
        tape = recorder.tape
        self._results = tuple(map(tape.register, results))
        self._arena, self._transport, self._all = recorder.received, recorder.own, recorder.all
        self._registers, self._steps = tape.registers(), recorder.steps
        packed = {op.writes for ops in tape.ops if isinstance(ops.function, Post) for op in ops.function.packing}
        self._ops = freeing(allocating_late(tape.ops, recorder.steps), packed, kept=frozenset(self._results))

    def __call__(self, inputs: Fields, arena: torch.Tensor, transport: Transport, failed: Failed) -> Fields:
        """Replay. inputs: like the recorded ones, see `tape.signature`. failed: makes the error of a step."""
        registers = self._registers.copy()
        registers[: len(inputs)] = inputs
        registers[self._arena] = arena
        registers[self._transport], registers[self._all] = transport, registers
        try:
            replay(self._ops, registers)
            return tuple(map(registers.__getitem__, self._results))
        except OpFailed as at:
            raise failed(bisect_right(self._steps, at.at), at.error) from at.error
        finally:
            registers.clear()  # it holds itself
