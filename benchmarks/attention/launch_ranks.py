"""Run one rank of a benchmark: join the others, measure, report."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention.baselines import baseline_methods
from benchmarks.attention.failures import StuckError
from benchmarks.attention.job import Job
from benchmarks.attention.measure import benchmark
from benchmarks.attention.method import Method, kernel_methods, our_methods
from benchmarks.attention.report import Record, tables
from dfa_megatron.doctor.world import World, join

STUCK_STATUS = 3


def run_rank(job: Job) -> int:
    """Run as a rank, measure, and leave; return the exit status.

    Raises:
        UnsupportedError: the job asks for something that does not exist here; on every rank.
    """
    world = join(job.device)
    if world.rank:
        warnings.simplefilter("ignore")  # rank 0 has the same
    baselines, absent = baseline_methods(job)
    roof = kernel_methods(job) if world.size == 1 else []
    status = measure(job, world, [*our_methods(job), *roof, *baselines], absent)
    if status == STUCK_STATUS:  # a communicator that waits for a message would wait for ever in its destructor
        sys.stdout.flush()
        os._exit(status)
    world.leave()
    return status


def measure(job: Job, world: World, methods: Sequence[Method], absent: Sequence[str] = ()) -> int:
    """Measure on this rank; rank 0 writes the files and prints the tables. Return the exit status."""
    logging.getLogger("benchmarks.attention.ablation").setLevel(logging.ERROR)  # the tables say it
    record = Record(job, world, absent)
    status = 0
    try:
        benchmark(job, world, methods, record)
    except StuckError as error:
        status = STUCK_STATUS
        record.say(f"ended early: {error}")
    if world.rank == 0:
        folder, made = Path(job.out), tables(record.rows)
        print(made, flush=True)
        (folder / "tables.txt").write_text(made, encoding="utf-8")
        print(f"results.json, tables.txt in {folder}", flush=True)
    return status
