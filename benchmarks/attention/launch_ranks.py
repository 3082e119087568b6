"""Being one rank of a benchmark: join the others, measure, report."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention.baselines import peer_methods
from benchmarks.attention.job import Job
from benchmarks.attention.measure import benchmark
from benchmarks.attention.method import Method, kernel_methods, our_methods
from benchmarks.attention.plot import plot
from benchmarks.attention.progress import Progress
from benchmarks.attention.report import show, tables, text_of
from benchmarks.attention.rows import Record
from dfa_megatron.doctor.world import StuckError, World, join

STUCK_STATUS = 3


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
    logging.getLogger("dfa_megatron.doctor.ablation").setLevel(logging.ERROR)  # the tables say it
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
