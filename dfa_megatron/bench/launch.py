"""The way from a command line to ranks: start them with torchrun's launcher, or be one of them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from dfa_megatron.bench.job import Job
from dfa_megatron.bench.method import Method, kernel_methods, our_methods
from dfa_megatron.bench.peers import peer_methods
from dfa_megatron.bench.plot import plot
from dfa_megatron.bench.progress import Progress
from dfa_megatron.bench.record import Record
from dfa_megatron.bench.report import show, tables, text_of
from dfa_megatron.bench.run import benchmark
from dfa_megatron.bench.world import StuckError, World, join
from dfa_megatron.errors import UnsupportedError

STUCK_STATUS = 3


def device_of(asked: str) -> str:
    """The device that a flag means: "auto" is GPUs where there are any.

    Raises:
        UnsupportedError: CUDA was asked for and there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda", "PyTorch sees no GPU here", "--device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def start(ranks: int | None, device: str, argv: Sequence[str]) -> int:
    """Run this command on so many ranks of this machine: one per GPU, or two on a CPU, if None.

    Returns:
        The exit status: that of the first rank that failed, 130 after Ctrl-C.

    Raises:
        UnsupportedError: more ranks than GPUs.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus and ranks is not None and ranks > gpus:
        raise UnsupportedError(f"--ranks {ranks}", f"this machine has {gpus} GPUs", "one rank per GPU")
    count = ranks or gpus or 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.disable(logging.ERROR)  # of torchrun, in this process only: the ranks say what is wrong
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    flags = ["--standalone", "--nproc-per-node", str(count), "-m", "dfa_megatron.cli.main", *argv]
    try:
        torchrun.run(torchrun.parse_args(flags))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 2 or failure.exitcode < 0:
            print(f"rank {rank} ended with status {failure.exitcode}; the other ranks were ended too", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as cut:
        print(f"\n{signal.Signals(cut.sigval).name}: all {count} ranks have ended", file=sys.stderr)
        return 128 + int(cut.sigval)
    return 0


def run_rank(job: Job) -> int:
    """Be a rank, measure, and leave; returns the exit status.

    Raises:
        UnsupportedError: the job asks for what there is not; on every rank.
    """
    world = join(job.device)
    if world.rank:
        warnings.simplefilter("ignore")  # rank 0 has the same
    peers, absent = peer_methods(job)
    roof = kernel_methods(job) if world.size == 1 else []
    status = measure(job, world, [*our_methods(job), *roof, *peers], absent)
    if status == STUCK_STATUS:  # a communicator that waits for a message would wait for ever in its destructor
        sys.stdout.flush()
        os._exit(status)
    world.leave()
    return status


def measure(job: Job, world: World, methods: Sequence[Method], absent: Sequence[str] = ()) -> int:
    """Measure on this rank; rank 0 writes the files and prints the tables. Returns the exit status."""
    logging.getLogger("dfa_megatron.runtime.ablation").setLevel(logging.ERROR)  # the tables say it
    progress = Progress(len(job.cells)) if world.rank == 0 else None
    record = Record(job, world, progress, absent)
    status = 0
    try:
        benchmark(job, world, methods, record)
    except StuckError as error:
        status = STUCK_STATUS
        if progress is not None:
            progress.say(f"ended early: {error}")
    finally:
        if progress is not None:
            progress.close()
    if world.rank == 0:
        _report(record, Path(job.out))
    return status


def _report(record: Record, folder: Path) -> None:
    made = tables(record.rows)
    for table in made:
        show(table)
    (folder / "tables.txt").write_text("\n".join(text_of(table) for table in made), encoding="utf-8")
    files = ["results.json", "results.csv", "tables.txt"]
    if plot(record.rows, folder / "tflops.png"):
        files.append("tflops.png")
    print(f"{', '.join(files)} in {folder}", flush=True)
