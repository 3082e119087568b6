"""Finds the longest sequence that one ZeRO-3 step takes: ours beside DeepSpeed's ALST.

    python -m benchmarks.deepspeed_longest --layers 2 --budget 540 --out longest.json      # on all GPUs there are
    DS_ACCELERATOR=cpu python -m benchmarks.deepspeed_longest --dry-run                    # tiny, two ranks

Forward, backward and optimizer, with tiled loss and ALST's tiled MLP for all. A method after another gets an even share
of the time left. Lengths double until one runs out of memory or would not end in time; between the longest that ran and
the shortest that ran out of memory one more is tried. Every attempt is a fresh set of processes, which takes a short
step before the one that is timed. First of all, loss and gradients of every method are compared with one rank's.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.failures import OUT_OF_MEMORY as MEMORY
from benchmarks.attention.failures import failure_of
from benchmarks.bench import Report, flags_of
from benchmarks.model_shapes import METHODS, SHAPES, Method, Shape
from dfa_megatron.doctor.world import join
from dfa_megatron.flags import flag

DEFAULT = ("dfa-remat", "ulysses-full", "dfa-remat-host", "ulysses-full-host")
STOPPED = "no time left"
COMPARE = "compare"

Attempt = Callable[[str, int, float], dict[str, Any]]
"""From a method, a length and the seconds left to a result: figures, or "failed"."""


@dataclass(frozen=True)
class Job:
    """What is searched, and within what."""

    shape: str = flag("llama-3-8b", "of the model", choices=tuple(SHAPES))
    layers: int = flag(2, "of it")
    shortest: int = flag(0, "the first length, of whole sequences; 0: 262144")
    methods: tuple[str, ...] = flag(DEFAULT, "to compare", choices=tuple(METHODS))
    offload_optimizer: bool = flag(False, "to the CPU")
    budget: float = flag(540.0, "seconds for all")
    kernel: str = flag("auto", "of ours")
    sdpa: str = flag("cudnn", "the kernel that Ulysses takes", choices=("cudnn", "flash"))
    gpus: int | None = flag(None, "ranks; by default all GPUs")
    out: Path | None = flag(None, "a JSON file, written again after every attempt")
    dry_run: bool = flag(False, "tiny sizes, on a CPU too")
    pretend_limit: int | None = flag(None, "of a dry run: longer sequences run out of memory")
    rank_of: tuple[str, str, str] | None = flag(None, "of the ranks: method, length and folder of an attempt")

    @property
    def sizes(self) -> Shape:
        """Return the shape, narrow in a dry run."""
        shape = SHAPES[self.shape]
        shape = replace(shape.toy(), vocabulary=128) if self.dry_run else shape
        return replace(shape, layers=self.layers)

    @property
    def choices(self) -> dict[str, str]:
        """Return the kernels."""
        return {"kernel": self.kernel, "sdpa": self.sdpa}


def parse(arguments: Sequence[str] | None = None) -> Job:
    """Return the command line."""
    job = flags_of(Job, __doc__, arguments)
    return replace(
        job, shortest=job.shortest or (64 if job.dry_run else 262144), layers=2 if job.dry_run else job.layers
    )


# Which lengths are tried.


def search(methods: Sequence[str], shortest: int, attempt: Attempt, left: Callable[[], float]) -> None:
    """Find each method's longest length, one method after another, each in its share of the time left."""
    for number, method in enumerate(methods):
        later = left() * (1 - 1 / (len(methods) - number))
        approach(method, shortest, attempt, lambda later=later: left() - later)  # type: ignore[misc]


def approach(method: str, shortest: int, attempt: Attempt, left: Callable[[], float]) -> None:
    """Double the length of one method until memory ends, and try one between."""
    fit: dict[str, Any] | None = None
    full, length = 0, shortest
    while True:
        result = attempt(method, length, left() if ends(length, fit) < left() else 0.0)
        if "failed" not in result:
            fit = result
        elif result["failed"].startswith(MEMORY):
            full = length
        else:
            return
        if fit is None or 0 < full <= fit["length"] * 3 // 2:
            return
        length = (fit["length"] + full) // 2 if full else 2 * fit["length"]


def ends(length: int, before: dict[str, Any] | None) -> float:
    """Return the seconds of an attempt, from those of a shorter length: attention grows with its square."""
    if before is None:
        return 0.0
    steps: float = before["seconds_per_step"] * (length / before["length"]) ** 2
    return steps + before["seconds_in_all"] - before["seconds_per_step"]


# The parent.


def launch(job: Job, ranks: int, method: str, length: int, seconds: float) -> dict[str, Any]:
    """Attempt once in new processes, or compare all methods if `method` is `COMPARE`."""
    result: dict[str, Any] = {"method": method, "length": length}
    if seconds <= 0:
        return result | {"failed": STOPPED}
    begin, late = time.perf_counter(), False
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.deepspeed_longest", *sys.argv[1:], "--rank-of", method, str(length), folder]
        environment = dict(os.environ)
        if "PYTORCH_ALLOC_CONF" not in environment:
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as ALST asks for
        process = subprocess.Popen(command, stdout=sys.stderr, env=environment)  # noqa: S603 -- the command is ours
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(60)
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("rank*.json"))]
    result["seconds_in_all"] = time.perf_counter() - begin
    # A rank that ran out of memory leaves others behind, whose errors are of its absence.
    failures = sorted((end["failed"] for end in found if "failed" in end), key=lambda why: not why.startswith(MEMORY))
    if failures:
        return result | {"failed": failures[0]}
    if late:
        return result | {"failed": f"{STOPPED}: ended after {seconds:.0f} s"}
    if len(found) != ranks:
        return result | {"failed": f"exit status {process.returncode}; see the output of the ranks"}
    return result | found[0]


def main() -> int:
    """Compare, search, and write after every attempt; 1 if something failed but for want of memory or time."""
    job = parse()
    if job.rank_of:
        rank_main(job, *job.rank_of)
        return 0
    begin, ranks = time.perf_counter(), job.gpus or torch.cuda.device_count() or 2
    note = f"{job.layers} layers" + (", and tiny" if job.dry_run else "")
    compared = launch(job, ranks, COMPARE, 0, job.budget)
    about = {key: value for key, value in compared.items() if key not in ("method", "length")}
    report = Report(job.out, job, shape=job.shape, note=note, **about, longest={}, results=[])
    report.show(report.content)
    if "failed" in compared:
        print("nothing is timed: the methods were not found to compute the same", file=sys.stderr)
        return 1

    def attempt(method: str, length: int, seconds: float) -> dict[str, Any]:
        result = launch(job, ranks, method, length, seconds)
        if "failed" not in result:
            longest = report.content["longest"]
            longest[method] = max(length, longest.get(method, 0))
        report.add(result, "results")
        return result

    able = [method for method in job.methods if "refused" not in report.content["agreement"][method]]
    search(able, job.shortest, attempt, lambda: begin + job.budget - time.perf_counter())
    failed = [one.get("failed", MEMORY) for one in report.content["results"]]
    return int(not all(why.startswith((MEMORY, STOPPED)) for why in failed))


# The ranks: one attempt.


def rank_main(job: Job, method: str, length: str, folder: str) -> None:
    """Run as a rank; write the result, or the error that ended it, to a file in the folder."""
    end = Path(folder, f"rank{os.environ['RANK']}.json")
    try:
        result = agreement(job) if method == COMPARE else step(job, METHODS[method], int(length))
    except Exception as error:  # noqa: BLE001 -- whatever it is goes to the parent, and the other ranks are ended
        traceback.print_exc()
        failure = failure_of(error)
        end.write_text(json.dumps({"failed": f"{failure.state}: {failure.why}"}))
        sys.stderr.flush()
        os._exit(1)  # the other ranks may hang in a collective, and ending properly would wait for them
    end.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries have aborted a busy machine's interpreter on its way out


def engine_for(job: Job, longest: int) -> tuple[Any, str]:
    """Return an engine and its optimizer's name."""
    from benchmarks.attention.baselines.deepspeed import join_deepspeed
    from benchmarks.deepspeed_common import build

    join_deepspeed(join(patience=max(job.budget, 60.0)))  # a collective waits for the computation before it
    return build(job.sizes, longest, tiled="all", offload=job.offload_optimizer, dry=job.dry_run)


def agreement(job: Job) -> dict[str, Any]:
    """Return how far the methods are from one rank.

    Raises:
        RuntimeError: too far.
    """
    from benchmarks.deepspeed_common import compare, made_with

    length = (16 if job.dry_run else 1024) * int(os.environ["WORLD_SIZE"])
    engine, optimizer = engine_for(job, length)
    report = compare(engine, {name: METHODS[name] for name in job.methods}, length, **job.choices)
    return {"agreement": report, "optimizer": optimizer, **made_with()}


def step(job: Job, method: Method, length: int) -> dict[str, Any]:
    """Time a step, after a short one with as many tiles, which makes what is made once.

    ZeRO-3 learns from that one in which order it gathers parameters, tile by tile.
    """
    from benchmarks.deepspeed_common import TILE, attention, measure

    engine, _ = engine_for(job, length)
    ranks = dist.get_world_size()
    if job.pretend_limit is not None and length > job.pretend_limit and dist.get_rank() == ranks - 1:
        raise torch.OutOfMemoryError("in a dry run")
    engine.module.tiles = tiles = math.ceil(length / ranks / (16 if job.dry_run else TILE))
    warmup = min(length, tiles * ranks * (8 if job.dry_run else math.ceil(4096 / tiles)))
    with attention(engine, method, **job.choices):
        found = measure(engine, method, length, steps=2, warmup=warmup)
    host = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, device=engine.device)
    dist.all_reduce(host)
    return found | {"host_gib_of_all_ranks": host.item()}


if __name__ == "__main__":
    sys.exit(main())
