"""Programs run in float64 over real, shared memory, with messages as early or as late as the program allows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from dfa_megatron.plan.interpret import Accumulator
from dfa_megatron.plan.language.geometry import Band
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Message, Program, Region
from tests.support import plan_dense as dense
from tests.support.plan_dense import WIDTH, Reference


class StuckError(Exception):
    """No rank can go on."""


class Partials:
    """The memory of accumulators; a sum is NaN until it is written."""

    def __init__(self, name: str, in_place: bool) -> None:
        self.name, self.in_place = name, in_place

    def new(self, rows: int, sum: bool) -> np.ndarray:
        return np.full((rows, WIDTH[self.name]), np.nan)

    def part(self, rows: np.ndarray, lo: int, hi: int) -> np.ndarray:
        if not 0 <= lo <= hi <= len(rows):
            raise IndexError(lo, hi)
        return rows[lo:hi]

    def merge(self, parts: list[np.ndarray], into: np.ndarray) -> None:
        total = parts[0].copy()
        for part in parts[1:]:
            total = dense.merge(total, part) if self.name == "out" else total + part
        into[:] = total

    def clear(self, rows: np.ndarray) -> None:
        rows[:] = [0.0] * (WIDTH[self.name] - 1) + [-np.inf if self.name == "out" else 0.0]

    def fits(self, partial: np.ndarray, rows: int) -> bool:
        return len(partial) == rows


class Memory:
    """One rank's memory: messages of one slot share an array, which starts as NaN; accumulators have their own."""

    def __init__(self, plan: Plan, program: Program, reference: Reference, in_place: bool) -> None:
        self.program = program
        self.accumulators = {
            number: Accumulator(buffer.merges, buffer.parts[0][1], Partials(buffer.parts[0][0], in_place))
            for number, buffer in enumerate(program.buffers)
            if buffer.merges is not None
        }
        sizes: dict[int, int] = {}
        for number, buffer in enumerate(program.buffers):
            slot = -1 - number if buffer.slot is None else buffer.slot
            sizes[slot] = max(sizes.get(slot, 0), sum(rows * WIDTH[name] for name, rows in buffer.parts))
        self.slots = {slot: np.full(size, np.nan) for slot, size in sizes.items()}
        for _, name in plan.phase.reads:
            self.view(program.home_buffer(name), name)[:] = _own(plan, program.rank, reference.rows(name))

    def view(self, buffer: int, name: str) -> np.ndarray:
        if buffer in self.accumulators:
            return self.accumulators[buffer].result()
        shape, at = self.program.buffers[buffer], 0
        memory = self.slots[-1 - buffer if shape.slot is None else shape.slot]
        for part, rows in shape.parts:
            if part == name:
                return memory[at : at + rows * WIDTH[name]].reshape(rows, WIDTH[name])
            at += rows * WIDTH[part]
        raise KeyError(name)

    def rows(self, region: Region) -> np.ndarray:
        rows = self.view(region.buffer, region.name)
        if not 0 <= region.lo <= region.hi <= len(rows):
            raise IndexError(region)
        return rows[region.lo : region.hi]

    def compute(self, call: Call) -> None:
        q, kv = self.rows(call.q), self.rows(call.kv)
        times = np.zeros((len(q), len(kv)), dtype=int)
        for launch in call.launches:
            rows, columns = (np.concatenate([np.arange(x.lo, x.hi) for x in spans]) for spans in (launch.q, launch.kv))
            for s in launch.segments:
                of_q, of_kv = rows[s.q_lo : s.q_hi], columns[s.kv_lo : s.kv_hi]
                np.add.at(times, np.ix_(of_q, of_kv), _window(launch.window or s.band, len(of_q), len(of_kv)))
        assert times.max(initial=0) <= 1, "a pair is computed twice"
        sees = times > 0
        forward = self.program.phase.name == "forward"
        results = (dense.forward(q, kv, sees),) if forward else dense.backward(q, kv, sees)
        for into, result in zip(call.writes, results, strict=True):
            self.accumulators[into.buffer].write(result)

    def take(self, message: Message) -> list[np.ndarray]:
        return [np.concatenate([self.rows(region) for region in part]) for part in message.parts]

    def land(self, message: Message, payload: list[np.ndarray]) -> None:
        for (region,), value in zip(message.parts, payload, strict=True):
            self.rows(region)[:] = value


def _own(plan: Plan, rank: int, rows: np.ndarray) -> np.ndarray:
    """The rows of a rank's tokens."""
    chunks = zip(plan.layout.chunks, plan.layout.owner, strict=True)
    return np.concatenate([rows[c.lo : c.hi] for c, home in chunks if home == rank])


def _window(band: Band, q_len: int, kv_len: int) -> np.ndarray:
    diagonal = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None] - (kv_len - q_len)
    left = diagonal >= -band.left if band.left >= 0 else True
    right = diagonal <= band.right if band.right >= 0 else True
    return np.broadcast_to(left & right, (q_len, kv_len))


class Machine:
    """All ranks, each with a compute queue and a queue of batches, as a device would have them.

    A batch may move as soon as the one before is over and the compute of `Step.after` is; a step's compute follows the
    landing of the step before. Between these rules a seed, or "eager" or "lazy" messages, decide.
    """

    def __init__(self, programs: Sequence[Program], memories: Sequence[Memory]) -> None:
        self.programs, self.memories = programs, memories
        self.steps = len(programs[0].steps)
        self.called = [0] * len(programs)
        self.merged = [0] * len(programs)
        self.moved = [0] * len(programs)
        self.arrived: set[tuple[int, int, int]] = set()

    def run(self, order: str, rng: random.Random) -> None:
        while any(merged < self.steps for merged in self.merged):
            messages, works = self._messages(), self._works()
            if not messages and not works:
                raise StuckError
            if order == "random":
                choice = rng.choice([*messages, *works])
            elif order == "eager":
                choice = (messages or works)[0]
            else:
                choice = (works or messages)[0]
            if len(choice) == 2:
                self._move(*choice)
            else:
                self._work(*choice)

    def _messages(self) -> list[tuple[int, int]]:
        """(source, destination) of messages that may move now; a batch with nothing left in it is over."""
        for rank, program in enumerate(self.programs):
            while self.moved[rank] < self.steps and self._posted(rank):
                step = program.steps[self.moved[rank]]
                ends = [(rank, m.peer) for m in step.sends] + [(m.peer, rank) for m in step.receives]
                if not all((self.moved[rank], *end) in self.arrived for end in ends):
                    break
                self.moved[rank] += 1
        found = []
        for rank in range(len(self.programs)):
            if self.moved[rank] < self.steps and self._posted(rank):
                for message in self.programs[rank].steps[self.moved[rank]].sends:
                    peer, step = message.peer, self.moved[rank]
                    if self.moved[peer] == step and self._posted(peer) and (step, rank, peer) not in self.arrived:
                        found.append((rank, peer))
        return found

    def _posted(self, rank: int) -> bool:
        return self.merged[rank] > self.programs[rank].steps[self.moved[rank]].after

    def _works(self) -> list[tuple[int]]:
        return [
            (rank,)
            for rank in range(len(self.programs))
            if self.merged[rank] < self.steps
            and (self.called[rank] == self.merged[rank] or self.moved[rank] > self.merged[rank])
        ]

    def _move(self, src: int, dst: int) -> None:
        step = self.moved[src]
        sent = next(m for m in self.programs[src].steps[step].sends if m.peer == dst)
        received = [m for m in self.programs[dst].steps[step].receives if m.peer == src]
        if not received or received[0].signature != sent.signature:
            raise StuckError
        self.memories[dst].land(received[0], self.memories[src].take(sent))
        self.arrived.add((step, src, dst))

    def _work(self, rank: int) -> None:
        step, memory = self.programs[rank].steps[self.merged[rank]], self.memories[rank]
        if self.called[rank] == self.merged[rank]:
            for call in step.calls:
                memory.compute(call)
            self.called[rank] += 1
        else:
            for merge in step.merges:
                memory.accumulators[merge.write.buffer].write(memory.rows(merge.source))
            self.merged[rank] += 1


def is_right(plan: Plan, programs: Sequence[Program], reference: Reference, order: str, seed: int = 0) -> bool:
    """The programs compute attention when messages move in this order: "eager", "lazy" or "random".

    With "lazy" sums are kept in the memory of the results.
    """
    memories = [Memory(plan, program, reference, in_place=order == "lazy") for program in programs]
    try:
        Machine(programs, memories).run(order, random.Random(seed))
    except (StuckError, IndexError, ValueError, KeyError):
        return False
    for _, name in plan.phase.writes:
        for rank, memory in enumerate(memories):
            got = memory.view(memory.program.home_buffer(name), name)
            if not np.allclose(got, _own(plan, rank, reference.rows(name)), rtol=1e-9, atol=1e-9):
                return False
    return True
