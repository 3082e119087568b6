"""A bound program: what a run of one rank's program does to tensors and messages, recorded once, then replayed.

The recorded run is a real one, driven by the one loop over the checked program, so what is checked is what is replayed.
A replay fills in the call's tensors: it looks nothing up, and computes no shape and no place in memory again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from dfa_megatron.errors import ExecutionError
from dfa_megatron.kernels.replay import VIEWS, Op, OpFailed, Registers, allocating_late, freeing, replay, views_of
from dfa_megatron.kernels.tape import Tape, unrecorded
from dfa_megatron.runtime.comm.transport import Arena, Moving, Recv, Send, Sends, Transport
from dfa_megatron.runtime.cuda_driver import Copy
from dfa_megatron.runtime.execute.wire_format import Fields
from dfa_megatron.runtime.execute.workspace import Ready, workspace_of

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

    def _sends(self, registers: Registers, moving: Moving | None) -> list[Send]:
        if self.packing and moving:
            with moving():
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
    """A transport that puts what passes through it on the tape that records the run.

    Args:
        tape: records the run around it.
        transport: moves the messages; what passes to one that moves nothing is left out.
        arena: the register of the memory that receives them.
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
        """Begin the run."""
        self._pass_on("start")

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Post the batch, and record the packing apart."""
        tape = self.tape
        if not self._moves:
            return
        landing = tuple((r.peer, tuple(map(tape.register, r.tensors))) for r in receives)
        before = tape.cut()
        bound: list[tuple[int, tuple[int, ...], Sequence[Copy]]] = []

        def recorded(moving: Moving | None) -> Sequence[Send]:
            with tape:
                found = sends(moving)
            bound.extend((s.peer, tuple(map(tape.register, s.tensors)), s.copies) for s in found)
            return found

        with unrecorded():
            self.transport.post(after, recorded, receives)
        packing, packed = list[Op](), set[int]()
        for op in tape.cut():
            if op.function in VIEWS and op.reads[0] not in packed:
                before.append(op)  # of what was there before; kernels may read the same view
            else:
                packing.append(op)
                packed.add(op.writes)
        post = Post(after, tuple(bound), landing, tuple(packing))
        tape.ops = before
        self._posted = post.touched
        tape.record_call(post, (self.own, self.all), holds=self._posted)

    def land(self) -> None:
        """Finish the batch."""
        self._pass_on("land", holds=self._posted)

    def computed(self, step: int) -> None:
        """Note the end of a step's compute."""
        self.steps.append(len(self.tape.ops))
        if self.transport.queued:
            self._pass_on("computed", step)

    def finish(self) -> None:
        """Note the end of the last step."""
        if self.transport.queued:
            self._pass_on("finish")

    def _pass_on(self, method: str, *args: Any, holds: tuple[int, ...] = ()) -> None:
        if not self._moves:
            return
        call = methodcaller(method, *args)
        with unrecorded():
            call(self.transport)
        self.tape.record_call(call, (self.own,), holds)


def computing_first(ops: Sequence[Op], launches: Set[int], transport: int) -> list[Op]:
    """Return the same operations with the first batch posted after the first kernels, if these wait for no message.

    An idle GPU need not wait while the host posts messages. The batch waits for what was computed before the run.

    launches: registers that kernels write. transport: its register.
    """
    post = next((at for at, op in enumerate(ops) if isinstance(op.function, Post)), len(ops))
    after, kernels = post, 0
    for at in range(post + 1, len(ops)):
        if transport in ops[at].reads or kernels == KERNELS_FIRST:
            break
        if ops[at].writes in launches:
            after, kernels = at, kernels + 1
    return [*ops[:post], *ops[post + 1 : after + 1], *ops[post : post + 1], *ops[after + 1 :]]


KERNELS_FIRST = 2
"""flash4's preparation of a backward, and the backward; its three conversions of results take the host longer."""


class Bound:
    """A recorded run of one phase.

    Args:
        recorder: of the run.
        results: the tensors that it returned.
    """

    def __init__(self, recorder: Recorder, results: Fields) -> None:
        tape = recorder.tape
        self._results = tuple(map(tape.register, results))
        self._arena, self._transport, self._all = recorder.received, recorder.own, recorder.all
        self._registers = tape.registers()
        # In memory that stays, views are made once.
        self._views = views_of(recorder.received, tape.ops) if recorder.transport.keeps_arena else []
        once = {op.writes for op in self._views}
        steps = [sum(op.writes not in once for op in tape.ops[:step]) for step in recorder.steps]
        recorded = [op for op in tape.ops if op.writes not in once]
        packed = {op.writes for ops in recorded if isinstance(ops.function, Post) for op in ops.function.packing}
        ops = allocating_late(recorded, steps)
        if recorder.transport.beside_kernels:
            ops = computing_first(ops, tape.launches, recorder.own)
        self._workspace, left = workspace_of(ops, frozenset(self._results))
        kept = {op.writes for op in left}
        self._steps = [sum(op.writes in kept for op in ops[:step]) for step in steps]
        self._ops = freeing(left, packed, kept=frozenset(self._results))
        self._ready = list[Ready]()

    def __call__(self, inputs: Fields, arena: Arena, transport: Transport, failed: Failed) -> Fields:
        """Replay. inputs: like the recorded ones, see `tape.signature`. failed: makes the error of a step."""
        # A list of those that no replay uses: another thread may replay at the same time.
        spare = arena.kept(self, lambda _: list[Ready]()) if self._views else self._ready
        try:
            ready = spare.pop() if spare else self._made_ready(arena.flat)
            registers, memory = ready.registers.copy(), ready.memory
            if memory is not None:
                memory.resize_(self._workspace.nbytes)
        except RuntimeError as error:  # there is no memory
            raise failed(0, error) from error
        registers[: len(inputs)] = inputs
        registers[self._arena] = arena.flat
        registers[self._transport], registers[self._all] = transport, registers
        try:
            replay(self._ops, registers)
            return tuple(map(registers.__getitem__, self._results))
        except OpFailed as at:
            raise failed(bisect_right(self._steps, at.at), at.error) from at.error
        finally:
            registers.clear()  # it holds itself
            if memory is not None:
                memory.resize_(0)
            spare.append(ready)

    def _made_ready(self, flat: torch.Tensor) -> Ready:
        """Return the registers as a replay begins with them. flat: the memory of the arena."""
        registers = self._registers.copy()
        registers[self._arena] = flat
        replay(self._views, registers)
        registers[self._arena] = None  # it would keep this call's memory for later ones
        return self._workspace.ready(registers, flat.device)
