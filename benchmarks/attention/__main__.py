"""`python -m benchmarks.attention`: time distributed attention beside others, after each is compared with dense."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attention.baselines import baseline_methods
from benchmarks.attention.failures import StuckError
from benchmarks.attention.job import PRESETS, Job
from benchmarks.attention.measure import Run
from benchmarks.attention.method import Method, kernel_methods, our_methods
from benchmarks.attention.report import tables
from benchmarks.bench import Report
from dfa_megatron.doctor.start_ranks import USER_ERROR_STATUS, device_of, ranks_here, start
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.flags import add_flags, from_flags

STUCK_STATUS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one; return the exit status: 2 for a request that cannot be served."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(job_of(given), given)
    except (DistAttentionError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # every rank has the same error, and one says it
            print(f"benchmarks.attention: {error}", file=sys.stderr)
        return USER_ERROR_STATUS


def run(job: Job, argv: Sequence[str]) -> int:
    """Start the ranks, or be one; return the exit status.

    Raises:
        UnsupportedError: a value that cannot be served.
    """
    if "RANK" in os.environ:
        return run_rank(job)
    baseline_methods(job)  # a baseline that does not run here is refused before ranks are started
    return start(["-m", "benchmarks.attention", *argv, "--out", job.out], ranks_here(job.ranks, job.device))


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
    report = Report(Path(job.out, "results.json"), job, not_compared=list(absent), rows=[])
    for why in absent:
        report.show(f"not compared with {why}")
    run, status = Run(job, world, methods, report), 0
    try:
        run.measure()
    except StuckError as error:
        status = STUCK_STATUS
        report.show(f"ended early: {error}")
    if world.rank == 0:
        made = tables(run.rows)
        Path(job.out, "tables.txt").write_text(made, encoding="utf-8")
        report.show(f"{made}\nresults.json, tables.txt in {job.out}")
    return status


def job_of(argv: Sequence[str]) -> Job:
    """Return the job that the flags, the preset and the defaults describe, in this order.

    Raises:
        UnsupportedError: heads that kv_heads do not divide, or CUDA without a GPU.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=f"{__doc__} Every combination of the flags is measured.",
        epilog="Started by torchrun it is one of its ranks; otherwise it starts the ranks itself.",
    )
    add_flags(parser, Job)
    args = vars(parser.parse_args(argv))
    given = dict(PRESETS.get(args.get("preset", ""), {}))
    if "heads" in args:
        given.pop("kv_heads", None)  # the preset's belong to the preset's heads
    given |= args | {"device": device_of(args.get("device", "auto"))}
    given.setdefault("out", str(Path("runs", time.strftime("bench-%Y%m%d-%H%M%S"))))
    job = from_flags(Job, argparse.Namespace(**given))
    _ = job.problems  # heads that do not divide are refused here
    return job


if __name__ == "__main__":
    sys.exit(main())
