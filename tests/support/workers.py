"""Run a function on every rank of a process group made of fresh processes, and end all of them whatever happens.

Processes come from a fork server. Call `preload` before its first use, and it imports torch once for all: a group then
starts in a fraction of a second. Functions, arguments and results travel by pickle between a test and the processes it
started itself.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

_PRELOADED: dict[str, None] = {}
"""Modules passed to `preload` until now, in order: each part of a test suite names its own."""

_DESTROYS = version("torch").split(".")[:2] != ["2", "6"]
"""With PyTorch 2.6 a rank was seen to hang in destroying a gloo group, about every second time: there it just ends."""

_GRACE = 3.0
"""Seconds that other ranks get to report after a failure, and that a process gets to end."""


@dataclass(frozen=True, slots=True)
class _Job:
    """The job of one worker; everything in it is plain."""

    rank: int
    world_size: int
    store: str
    timeout: float
    cuda: bool
    environment: dict[str, str]
    path: list[str]
    module: str
    file: str | None
    call: bytes


def preload(*modules: str) -> None:
    """Have the fork server import torch and these modules too; no effect once it runs (`run_ranks` starts it)."""
    _PRELOADED.update(dict.fromkeys(modules))
    names = ["torch", "torch.distributed", __name__, *_PRELOADED]
    multiprocessing.get_context("forkserver").set_forkserver_preload(names)


def transports(ranks: int) -> list[str]:
    """Return the transports between so many ranks on GPUs; copy engines need a GPU for each."""
    import torch

    return ["p2p", *(["copy_engine"] if torch.cuda.device_count() >= ranks else [])]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    cuda: bool = False,
    grace: float = _GRACE,
) -> list[Any]:
    """Call function(rank, world_size, *args) on every rank of a new default group, one process and CPU thread each.

    Args:
        function: defined at the top level of a module. Workers see the environment variables and sys.path of now.
        timeout: seconds until all processes are killed.
        grace: seconds that the other ranks are given to report, after one has failed.
        cuda: give each rank a GPU as its current device, and NCCL for tensors there. CPU tensors always go by gloo.
            Where GPUs are fewer than ranks, ranks share them: see `benchmarks.bench.share_gpus`.

    Returns:
        What each rank returned, by rank. Tensors arrive as copies.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not end in time (with its stack).
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        workers: list[_Worker] = []
        try:
            for job in _jobs(world_size, function, args, timeout, cuda, folder):
                workers.append(_Worker(job, folder))
            _collect(workers, time.monotonic() + timeout, grace)
            _assert_all_well(workers, timeout)
        finally:
            for worker in workers:
                worker.end()
    return [worker.value for worker in workers]


def over_ranks(
    *counts: int, timeout: float = 60.0, cuda: bool = False, kernel: Callable[[str], object] = str
) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function of (rank, ranks, and fixtures that can be pickled): ranks of each count run it.

    Without counts the test has a parameter `ranks`. `kernel` may skip it for its parameter of that name.
    """

    def decorate(function: Callable[..., None]) -> Any:
        def test(*on_a_rank: Any, **given: Any) -> None:
            if on_a_rank:
                function(*on_a_rank)
            else:
                kernel(given.get("kernel", ""))
                run_ranks(given.pop("ranks", *counts[:1]), test, *given.values(), timeout=timeout, cuda=cuda)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        several = [inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)] if len(counts) != 1 else []
        given = [*inspect.signature(function).parameters.values()][2:]
        vars(test)["__signature__"] = inspect.Signature([*given, *several])
        if len(counts) < 2:
            return test
        import pytest

        return pytest.mark.parametrize("ranks", counts)(test)

    return decorate


def run_each(world_size: int, *functions: Callable[[int, int], Any], timeout: float = 60.0) -> list[list[Any]]:
    """Call these functions one after another on the same ranks; return what each returned, by function and rank."""
    by_rank = run_ranks(world_size, _in_turn, functions, timeout=timeout)
    return [list(results) for results in zip(*by_rank, strict=True)]


def by_turns(cases: Sequence[Any]) -> Sequence[Any]:
    """Return all cases, or with DFA_HALF=0 or 1, as the gate has it by turns from day to day, every second one."""
    half = os.environ.get("DFA_HALF")
    return (cases[int(half) :: 2] if half else cases) or cases


def _in_turn(rank: int, world_size: int, functions: tuple[Callable[[int, int], Any], ...]) -> list[Any]:
    return [function(rank, world_size) for function in functions]


def _jobs(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, cuda: bool, folder: str
) -> Iterable[_Job]:
    module = sys.modules[function.__module__]
    call = pickle.dumps((function, args))
    for rank in range(world_size):
        yield _Job(
            rank=rank,
            world_size=world_size,
            store=os.path.join(folder, "store"),
            timeout=timeout,
            cuda=cuda,
            environment=dict(os.environ),
            path=list(sys.path),
            module=module.__name__,
            file=getattr(module, "__file__", None),
            call=call,
        )


class _Worker:
    """One rank's process, as the test sees it."""

    def __init__(self, job: _Job, folder: str) -> None:
        # What the fork server imports may touch CUDA, and a forked process cannot do so again.
        context: Any = multiprocessing.get_context("spawn" if job.cuda else "forkserver")
        self.rank = job.rank
        self.value: Any = None
        self.failure: str | None = None
        self.failed_at = 0.0
        self.done = False
        self.stack = Path(folder, f"stack-{job.rank}")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(job, theirs, str(self.stack)), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take the result; a pipe that closed without one means that the process died."""
        self.done, self.failed_at = True, time.monotonic()
        try:
            succeeded, payload = pickle.loads(self.pipe.recv_bytes())  # noqa: S301 (from our own process)
        except (EOFError, ConnectionResetError):
            self.process.join(1.0)
            self.failure = f"the process died with exit code {self.process.exitcode}"
            return
        if succeeded:
            self.value = payload
        else:
            self.failure = payload

    def where(self) -> str:
        """Return the stacks of a process that does not answer."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self.stack.read_text() if self.stack.exists() else ""

    def end(self) -> None:
        """End the process if it still runs."""
        if not self.done or self.failure is not None:
            self.process.kill()
        self.process.join(_GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _collect(workers: list[_Worker], deadline: float, grace: float) -> None:
    """Receive until every rank has answered or the deadline has passed; a failure shortens the deadline."""
    while pending := [worker for worker in workers if not worker.done]:
        ready = wait([worker.pipe for worker in pending], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for worker in pending:
            if worker.pipe in ready:
                worker.receive()
                if worker.failure is not None:
                    deadline = min(deadline, time.monotonic() + grace)


def _assert_all_well(workers: list[_Worker], timeout: float) -> None:
    # The first to fail is the cause, and what the others met is mostly a connection to it that broke.
    failed = sorted((worker for worker in workers if worker.failure is not None), key=lambda worker: worker.failed_at)
    silent = [worker for worker in workers if not worker.done]
    if not failed and not silent:
        return
    when = "after another rank had failed" if failed else f"within {timeout:g} s"
    # All causes come before the first traceback, for those who see only the beginning of a log.
    reports = (
        ["; then ".join(f"rank {worker.rank}: {_last_line(worker.failure)}" for worker in failed)] if failed else []
    )
    reports += [f"rank {worker.rank} failed:\n{worker.failure}" for worker in failed]
    reports += [f"rank {worker.rank} did not end {when}. Its stack:\n{worker.where()}" for worker in silent]
    raise AssertionError("\n".join(reports))


def _last_line(failure: str | None) -> str:
    """Return the exception line of a traceback."""
    lines = (failure or "").strip().splitlines()
    return lines[-1] if lines else ""


def _serve(job: _Job, pipe: Connection, stack: str) -> None:
    """Run as the body of a worker process."""
    gc.freeze()  # what the fork server imported: to look through it for garbage would copy its pages, for seconds
    os.environ.update(job.environment)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(stack, "w") as report:
        faulthandler.register(signal.SIGUSR1, file=report, all_threads=True)
        try:
            answer = pickle.dumps((True, _call(job)))
        except BaseException:  # noqa: BLE001 (also a SystemExit has to reach the test)
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        pipe.close()


def _call(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if not job.cuda:
        seed_the_cpu_alone()
    sys.path[:] = job.path
    _import(job.module, job.file)
    function, args = pickle.loads(job.call)  # noqa: S301 (from the test that started us)
    if job.cuda:
        from benchmarks.bench import share_gpus

        share_gpus(job.rank, job.world_size)
    _work_one_by_one()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if job.cuda else "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    result = function(job.rank, job.world_size, *args)
    if dist.is_initialized():
        dist.barrier()  # a rank that left early would tear down connections that others still read from
        if _DESTROYS:
            dist.destroy_process_group()
    return result


def seed_the_cpu_alone() -> None:
    """Drop what a seed has other devices do later: PyTorch formats the stack of each call for it, in 7 ms."""
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        vars(device)["_lazy_call"] = lambda call, **_: None


def _work_one_by_one() -> None:
    """Let each gloo group made from now on have one thread.

    Two, the default, write the name of the work that they completed to one string without a lock. Names of more than 15
    letters, of reduce-scatters and coalesced all-gathers, are then freed twice: PyTorch 2.13 aborts now and then, and
    within seconds in a loop of these alone.
    """
    import torch.distributed as dist

    class OneThread(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_newer: Any) -> None:
            options, name = self._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
            options._devices = [self.create_device(interface=name) if name else self.create_default_device()]
            options._threads, options._timeout = 1, timeout
            super().__init__(store, rank, size, options)

    vars(dist.distributed_c10d)["ProcessGroupGloo"] = OneThread


def _import(name: str, file: str | None) -> ModuleType:
    """Import a module by name or, where its folder is on no path (pytest's importlib mode), from its file."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        spec: ModuleSpec | None = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
