"""A small training over gloo ranks in which one rank meets a fault; every rank writes down what it sees.

The same steps in dense float64, over the whole sequence, say on every rank whether a step of it is exact.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.errors import DisagreementError
from dfa_megatron.plan.language.geometry import CAUSAL
from dfa_megatron.runtime import prepare, run
from dfa_megatron.runtime.agreement.calls import at_layer
from dfa_megatron.runtime.execute import bound
from tests.support.groups import rank_0_keeps_the_store
from tests.support.workers import _jobs, _Worker

RANKS, LOCAL, HEADS, DIM, LAYERS = 3, 8, 2, 8, 2
WIDTH = HEADS * DIM
STRUCK = 2
"""The step in which a fault strikes, but for those of the first agreement: all plans are known then."""
GROUP = 12.0
"""The timeout of the process group, in seconds: a rank that is silent or does not come is waited for a quarter."""
PAUSE, WRITING = 1.0, 4.5
"""Seconds that a paused rank stands still, and that a checkpoint takes: less and more than that quarter."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """What happens, where, and to which rank."""

    kind: str
    where: str
    rank: int
    step: int = STRUCK

    def __str__(self) -> str:
        return f"{self.kind} in {self.where} on {self.rank}"


class Training:
    """Two layers of attention with a residual, trained by gradient descent on a sum of squares.

    passing: called in each layer, forward ("layer forward") and backward ("layer backward").
    """

    def __init__(self, rows: slice, attention: Attention, passing: Callable[[str], None]) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        whole = random(RANKS * LOCAL, WIDTH), random(RANKS * LOCAL, WIDTH)
        self.x, self.target = (x[rows] for x in whole)
        self.weights = [(random(WIDTH, 4 * WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(LAYERS)]
        self.attention, self.passing = attention, passing

    def gradients(self) -> None:
        """Forward and backward of these rows; a step that failed before may have left gradients."""
        x = self.x
        for weight in self.weights:
            weight.grad = None
        for layer, weight in enumerate(self.weights):
            q, k, v, rest = (x @ weight).view(1, -1, 4, HEADS, DIM).unbind(2)
            x = x + self.attention(layer, q, k, v).reshape(x.shape) * rest.reshape(x.shape)
            if layer == 0:
                self.passing("layer forward")
                x.register_hook(lambda gradient: self.passing("layer backward"))
        (x - self.target).square().sum().backward()

    def update(self) -> None:
        """The optimizer's step."""
        with torch.no_grad():
            for weight in self.weights:
                assert weight.grad is not None
                weight -= 1e-4 * weight.grad

    def state(self) -> torch.Tensor:
        """All weights, copied."""
        return torch.stack(self.weights).detach()


def expected(steps: int) -> list[torch.Tensor]:
    """The weights after each step, by dense attention in float64 over the whole sequence."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, k, v, CAUSAL)[0]

    training, states = Training(slice(None), attend, lambda where: None), []
    for _ in range(steps):
        training.gradients()
        training.update()
        states.append(training.state())
    return states


class Rank:
    """One rank's run, with the faults that are meant for it.

    exhausted: it is out of memory. together: all ranks try the first agreement again when one of them refuses.
    """

    def __init__(self, rank: int, faults: tuple[Fault, ...], steps: int, folder: str, together: bool) -> None:
        self.rank, self.steps, self.folder, self.step = rank, steps, Path(folder), 0
        self.exhausted, self.together, self.phase = False, together, ""
        self.faults = [fault for fault in faults if fault.rank == rank]
        rows = slice(LOCAL * rank, LOCAL * (rank + 1))
        self.training, self.states = Training(rows, self.attend, self.meet), expected(steps)
        for name in ("cpu", "reference"):
            for method in ("forward", "backward"):
                _before(type(kernels.get(name)), method, lambda method=method: self.meet(method))
        for name, phase in (("run_forward", "forward"), ("run_backward", "backward")):
            _before(run, name, lambda phase=phase: setattr(self, "phase", phase))
        _before(bound.Post, "__call__", lambda: self.meet(self.phase))  # of a replay, which enters no kernel's method
        _before(prepare, "kernel_of", lambda: self.meet("agreement"))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with at_layer(layer + 1):
            config = DistAttentionConfig(schedule="balanced")
            out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, config=config)
        assert isinstance(out, torch.Tensor)
        return out

    def write(self, **line: Any) -> None:
        with (self.folder / f"rank{self.rank}").open("a") as file:
            print(json.dumps({"at": time.time(), **line}), file=file, flush=True)

    def meet(self, where: str) -> None:
        """Meet the fault of this place and step, once."""
        for fault in self.faults:
            if (fault.where, fault.step) == (where, self.step):
                self.faults.remove(fault)
                self.write(fault=str(fault))
                self.exhausted = fault.kind == "out of memory"
                STRIKES[fault.kind]()
                return

    def run(self) -> None:
        """All steps. A rank that is out of memory gives its batch up, or tries again where no other rank takes part."""
        while self.step < self.steps:
            try:
                self.training.gradients()
            except Exception as error:
                if not self.exhausted and not (self.together and isinstance(error, DisagreementError)):
                    raise
                self.write(caught=str(error))
                self.exhausted = False
                self.step += self.step != 0
                continue
            for weight in self.training.weights:
                dist.all_reduce(weight.grad)
            self.retried("optimizer")
            self.training.update()
            self.retried("checkpoint")
            difference = (self.training.state() - self.states[self.step]).abs().max().item()
            self.write(step=self.step, exact=difference < 1e-12)
            self.step += 1

    def retried(self, where: str) -> None:
        try:
            self.meet(where)
        except torch.OutOfMemoryError as error:
            self.write(caught=str(error))
            self.exhausted = False


def _before(owner: Any, name: str, action: Callable[[], None]) -> None:
    """Have a function of a class or module do something first."""
    function = getattr(owner, name)

    def changed(*args: Any, **options: Any) -> Any:
        action()
        return function(*args, **options)

    setattr(owner, name, changed)


def pauses() -> None:
    """Stop this process for some time."""
    with subprocess.Popen(["/bin/sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def fails(error: Exception) -> None:
    raise error


STRIKES: dict[str, Callable[[], object]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSTOP, SIGCONT": pauses,
    "exception": lambda: fails(RuntimeError("an accident of this test")),
    "out of memory": lambda: fails(torch.OutOfMemoryError("out of memory in this test")),
    "slow": lambda: time.sleep(WRITING),
}
"""What happens to a process, by the kind of a fault."""


def train(rank: int, ranks: int, faults: tuple[Fault, ...], steps: int, folder: str, together: bool) -> None:
    """The body of a rank: the store of the group is in rank 0, as without torchrun, and goes or stops with it."""
    rank_0_keeps_the_store(rank, ranks, Path(folder), GROUP)
    run = Rank(rank, faults, steps, folder, together)
    run.write(pid=os.getpid())
    try:
        run.run()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        run.write(error=type(error).__name__, text=str(error))
        raise
    finally:
        atexit._run_exitfuncs()  # as a script does when it ends, with or without an exception
    run.write(end=True)


LIMIT = 25.0
"""Seconds in which all ranks must have ended that a fault has not stopped."""


@dataclass
class Seen:
    """What became of one rank: its lines, its exit status, None where it had to be ended, and when it ended."""

    lines: list[dict[str, Any]]
    status: int | None
    ended: float

    @property
    def error(self) -> str:
        return next((f"{line['error']}: {line['text']}" for line in self.lines if "error" in line), "")

    @property
    def errs(self) -> float:
        """When the error came."""
        return next(line["at"] for line in self.lines if "error" in line)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]


@dataclass
class Run:
    """A whole run, by rank."""

    ranks: list[Seen]
    struck: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for seen in self.ranks:
            self.struck |= {line["fault"]: line["at"] for line in seen.lines if "fault" in line}


def recorded(fault: str, where: str, rank: int | None, happens: str, seconds: float | None = None) -> dict[str, Any]:
    """What docs/trust.md says of a test."""
    rounded = None if seconds is None else round(seconds, 1)
    about = {"fault": fault, "where": where, "rank": rank, "happens": happens}
    return about | {"seconds": rounded, "transport": "gloo"}


def run_training(faults: tuple[Fault, ...], steps: int = 4, *, together: bool = False) -> Run:
    """Train with these faults; a rank that is stopped for good is ended once the others have ended, as launchers do."""
    stopped = {fault.rank for fault in faults if fault.kind == "SIGSTOP"}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        workers: list[Any] = []
        try:
            for job in _jobs(RANKS, train, (faults, steps, folder, together), 60.0, False, folder):
                workers.append(_Worker(job, folder))
            ended = _wait({w.process.sentinel: w.rank for w in workers if w.rank not in stopped})
            statuses = [worker.process.exitcode for worker in workers]
            lines = [_lines(Path(folder, f"rank{rank}")) for rank in range(RANKS)]
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()
    return Run([Seen(lines[rank], statuses[rank], ended.get(rank, 0.0)) for rank in range(RANKS)])


def _wait(sentinels: dict[int, int]) -> dict[int, float]:
    ended: dict[int, float] = {}
    deadline = time.monotonic() + LIMIT
    while sentinels and (ready := wait(list(sentinels), max(0.0, deadline - time.monotonic()))):
        ended |= {sentinels.pop(sentinel): time.time() for sentinel in ready}  # type: ignore[call-overload]
    return ended


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
