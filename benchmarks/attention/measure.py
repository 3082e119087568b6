"""Run a benchmark on one rank: for every cell check each method, time them in turns, and keep the rows."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

from benchmarks.attention import correctness as check
from benchmarks.attention.clock import LONG, Memory, Timer, once, repetitions, take_turns
from benchmarks.attention.failures import OUT_OF_MEMORY, REFUSED, Failure, StuckError, together
from benchmarks.attention.job import FLOPS_OF, PASSES, Job, Problem
from benchmarks.attention.method import Attention, Method
from benchmarks.attention.report import Row, line
from benchmarks.bench import Call, Report
from benchmarks.programs import Tensors, draw, passes
from dfa_megatron.doctor.world import World
from dfa_megatron.runtime.counters import COUNTERS

_GUESS = {"cuda": 4e14, "cpu": 1e10}
"""Floating-point operations per second of a rank, for a first guess at how long a cell takes."""


@dataclass(slots=True)
class _Entry:
    """A method in one cell."""

    method: Method
    row: Row
    timers: dict[str, Timer] = field(default_factory=dict)


class Run:
    """A benchmark on one rank; its state between cells is the same on every rank."""

    def __init__(self, job: Job, world: World, methods: Sequence[Method], report: Report) -> None:
        self.job, self.world, self.methods, self.report = job, world, methods, report
        self.rows: list[Row] = []
        self.began = time.monotonic()
        self.rate = 1.0
        """Seconds that the last cell took once its methods were checked, in guesses."""
        self.answers: dict[tuple[str, Problem], tuple[float, str, str]] = {}
        """(error, state, why) of a method that was checked."""
        self.full: dict[tuple[str, Problem], int] = {}
        """The length at which a method ran out of memory."""

    def measure(self) -> None:
        """Measure all cells. A cell that cannot be measured is a row as well.

        Raises:
            StuckError: a rank failed where others wait for it; the rows until then are kept, and name the cells left
                out.
        """
        for number, (problem, length) in enumerate(self.job.cells):
            try:
                self.cell(problem, length)
            except StuckError as error:
                for left in self.job.cells[number:]:
                    self.drop(*left, f"the benchmark ended early: {error}")
                raise
            self.report.show(f"[{number + 1}/{len(self.job.cells)}]")

    def cell(self, problem: Problem, length: int) -> None:
        """Check and time every method on one attention at one length."""
        if self._over_budget(problem, length):
            self.drop(problem, length, f"the budget of {self.job.budget:g} s would be exceeded")
            return
        entries = [_Entry(method, self._row(method, problem, length)) for method in self.methods]
        for entry in entries:
            self._admit(entry, problem, length)
        begin = time.monotonic()
        with ExitStack() as stack:
            inputs = self._inputs(entries, problem, length)
            for entry in entries:
                if inputs is not None and entry.row.state == "":
                    self._try(entry, problem, inputs, stack)
            racing = [entry for entry in entries if entry.timers]
            take_turns(self.world, [timer for entry in racing for timer in entry.timers.values()])
        for entry in racing:
            _fill(entry, problem, length, self.world.size)
        for entry in entries:
            self._add(entry.row)
        if racing:
            self.rate = (time.monotonic() - begin) / self._guess(problem, length, len(racing))

    def drop(self, problem: Problem, length: int, why: str) -> None:
        """Record that a cell was left out."""
        for method in self.methods:
            row = self._row(method, problem, length)
            row.state, row.why = "dropped", why
            self._add(row)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.report.add(asdict(row), said=line(row))

    def _row(self, method: Method, problem: Problem, length: int) -> Row:
        return Row(method.name, method.kind, self.world.size, **asdict(problem), seq_length=length, note=method.note)

    def _guess(self, problem: Problem, length: int, methods: int) -> float:
        call = FLOPS_OF["both"] * problem.flops(length) / self.world.size / _GUESS[self.world.device.type]
        return methods * (0.5 + max(2.5 * self.job.seconds, (self.job.repetitions + 1) * 1.3 * call))

    def _over_budget(self, problem: Problem, length: int) -> bool:
        if not self.job.budget:
            return False
        ends = time.monotonic() - self.began + self.rate * self._guess(problem, length, len(self.methods))
        end = torch.tensor(ends, dtype=torch.float64)
        dist.broadcast(end, 0, group=self.world.side)  # rank 0's clock decides for all
        return float(end) > self.job.budget

    def _admit(self, entry: _Entry, problem: Problem, length: int) -> None:
        """Give the row a state if the method need not be tried: it is wrong, refused, or cannot fit."""
        row, key = entry.row, (entry.method.name, problem)
        if length % (2 * self.world.size):
            row.state, row.why = REFUSED, f"{length} tokens do not divide into 2 parts on each of {row.ranks} ranks"
        elif key in self.full:
            row.state, row.why = OUT_OF_MEMORY, f"it ran out of memory at {self.full[key]} tokens"
        elif entry.method.exact:
            if key not in self.answers:
                self.answers[key] = check.compared(entry.method, _truth(problem, self.world), self.world)
            row.error, row.state, row.why = self.answers[key]

    def _inputs(self, entries: Sequence[_Entry], problem: Problem, length: int) -> Tensors | None:
        """Return q, k, v and dout of a rank, for all methods."""
        sizes = length // self.world.size, problem.heads, problem.kv_heads, problem.head_dim
        where = {"device": self.world.device, "dtype": getattr(torch, problem.dtype)}
        inputs = together(self.world, functools.partial(draw, *sizes, **where))
        if not isinstance(inputs, Failure):
            return inputs
        for entry in entries:
            if entry.row.state == "":
                entry.row.state, entry.row.why = inputs.state, f"the inputs alone: {inputs.why}"
        return None

    def _try(self, entry: _Entry, problem: Problem, inputs: Tensors, stack: ExitStack) -> None:
        """Make the first call, which may compile or fail, then one more of each pass to know its time."""
        method, row = entry.method, entry.row
        local_seq = inputs[0].shape[1]
        row.inputs_gib = sum(x.numel() * x.element_size() for x in inputs) / 2**30
        memory, sent = Memory(self.world), _sent()

        def first() -> dict[str, Call]:
            calls = _passes(method, method.start(problem, local_seq, self.world, stack), inputs)
            calls[self.job.passes[-1]]()
            return calls

        calls = together(self.world, first)
        if isinstance(calls, Failure):
            row.state, row.why = calls.state, calls.why
            if calls.state == OUT_OF_MEMORY:
                self.full[method.name, problem] = row.seq_length
            return
        memory.read()
        row.took = method.took()
        largest = self.world.slowest([memory.peak + method.held(), memory.outside, _sent() - sent])
        row.beyond_gib, row.outside_gib, row.sent_mib = largest[0] / 2**30, largest[1] / 2**30, largest[2] / 2**20
        row.peak_gib = row.inputs_gib + row.beyond_gib
        for name in self.job.passes:
            milliseconds, host = self.world.slowest(once(self.world, calls[name]))
            times = repetitions(milliseconds, self.job.repetitions, self.job.seconds)
            timer = entry.timers[name] = Timer(calls[name], times)
            if milliseconds > 1e3 * LONG:  # too dear to throw away
                timer.milliseconds.append(milliseconds)
                timer.host.append(host)


@functools.lru_cache(maxsize=1)
def _truth(problem: Problem, world: World) -> check.Truth:
    return check.truth(problem, world)


def _passes(method: Method, attend: Attention, inputs: Tensors) -> dict[str, Call]:
    def inside(call: Call) -> Call:
        def run() -> None:
            with method.around():
                call()

        return run

    return dict(zip(PASSES, map(inside, passes(attend, inputs[:3], inputs[3])), strict=True))


def _sent() -> int:
    c = COUNTERS
    return c.forward_bytes + c.backward_bytes + c.ulysses_forward_bytes + c.ulysses_backward_bytes


def _fill(entry: _Entry, problem: Problem, length: int, ranks: int) -> None:
    row = entry.row
    row.state = "timed"
    for name, timer in entry.timers.items():
        flops = FLOPS_OF[name] * problem.flops(length) / ranks
        setattr(row, f"{name}_ms", timer.median)
        setattr(row, f"{name}_tflops", flops / timer.median / 1e9)
        setattr(row, f"{name}_host_ms", timer.host_median)
        row.times[name] = [round(one, 4) for one in timer.milliseconds]
