"""Trains model shapes with ZeRO-3 over sequences shared by all GPUs: our attention beside DeepSpeed's Ulysses.

    torchrun --nproc-per-node 4 -m benchmarks.deepspeed_training --out results.json
    torchrun --nproc-per-node 4 -m benchmarks.deepspeed_training --shapes qwen3-4b --layers 36 --vocabulary 151936 \
        --lengths 65536 --offload-optimizer --tiled all --methods dfa-remat ulysses-full       # a whole Qwen3-4B
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m benchmarks.deepspeed_training --dry-run      # tiny

By default layers and vocabulary are cut, which the output says. All methods share one engine per shape, so that only
attention and checkpointing differ, and have come to the loss and gradients of one rank before any is timed. A case that
runs out of memory, that Ulysses refuses, or for which no time is left is recorded so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.attention.baselines.deepspeed import join_deepspeed
from benchmarks.attention.failures import attempt
from benchmarks.bench import Report, benchmark, clear_memory, flags_of
from benchmarks.deepspeed_common import attention, build, compare, made_with, measure
from benchmarks.model_shapes import METHODS, SHAPES
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag


@dataclass(frozen=True)
class Job:
    """The cases, and how they run."""

    shapes: tuple[str, ...] = flag(("llama-3-8b", "qwen2.5-7b", "33-heads"), "of models", choices=tuple(SHAPES))
    lengths: tuple[int, ...] = flag((32768, 65536, 131072), "of whole sequences")
    layers: int = flag(4, "of each model")
    vocabulary: int = flag(32768, "of each model")
    steps: int = flag(2, "timed ones, after one that is not")
    schedule: str = flag("auto", "of ours")
    kernel: str = flag("auto", "of ours")
    sdpa: str = flag("cudnn", "the kernel that Ulysses takes", choices=("cudnn", "flash"))
    methods: tuple[str, ...] = flag(tuple(METHODS)[:5], "to compare", choices=tuple(METHODS))
    tiled: str = flag("none", "of every method: loss by tiles, or the MLPs too", choices=("none", "loss", "all"))
    budget: float = flag(210.0, "seconds; later cases are left out")
    offload_optimizer: bool = flag(False, "to the CPU")
    out: Path | None = flag(None, "a JSON file, written again after every case")
    dry_run: bool = flag(False, "tiny sizes, on a CPU too")

    @property
    def cut(self) -> dict[str, int]:
        """Return the sizes that are not the model's own."""
        return {"layers": self.layers, "vocabulary": self.vocabulary}

    @property
    def choices(self) -> dict[str, str]:
        """Return the kernels and the schedule."""
        return {"kernel": self.kernel, "schedule": self.schedule, "sdpa": self.sdpa}


def start(shape: str, job: Job, about: dict[str, Any]) -> Any:
    """Build an engine whose methods agree with one rank; write differences and optimizer to `about`.

    Raises:
        RuntimeError: a method computes something else.
    """
    sizes = replace(SHAPES[shape].toy() if job.dry_run else SHAPES[shape], **job.cut)
    offload, dry = job.offload_optimizer, job.dry_run
    engine, about["optimizer"] = build(sizes, max(job.lengths), tiled=job.tiled, offload=offload, dry=dry)
    length = (16 if job.dry_run else 1024) * dist.get_world_size()
    methods = {name: METHODS[name] for name in job.methods}
    about["agreement"][shape] = compare(engine, methods, length, **job.choices)
    return engine


def stop(engine: Any) -> None:
    """Give its memory back."""
    if engine is not None:
        engine.destroy()
    del engine
    clear_memory()


def figures(engine: Any, case: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return a case's figures."""
    method = METHODS[case["method"]]
    with attention(engine, method, **job.choices):
        return measure(engine, method, case["length"], steps=job.steps)


def cases(job: Job) -> Iterator[dict[str, Any]]:
    """Yield every case once: for each shape, the lengths from the shortest."""
    for shape in job.shapes:
        for length in sorted(job.lengths):
            for method in METHODS:
                if method in job.methods:
                    yield {"shape": shape, "length": length, "method": method}


def run(job: Job, world: World, report: Report) -> None:
    """Run the cases while there is time; an engine in which one failed is not used again."""
    agreement, engine, current = report.content["agreement"], None, ""
    failed: set[tuple[str, str]] = set()
    for case in cases(job):
        key = (case["shape"], case["method"])
        if key in failed:
            case["failed"] = "a shorter sequence did not run"
        elif report.seconds > job.budget:
            case["failed"] = "no time left"
        else:
            if engine is None or case["shape"] != current:
                stop(engine)
                engine, current = None, case["shape"]
                engine = start(current, job, report.content)
            if refused := agreement[current][case["method"]].get("refused"):  # heads, by Ulysses
                case["failed"] = refused
                failed.add(key)
            else:
                case |= attempt(world, functools.partial(figures, engine, case, job))
                if "failed" in case:
                    failed.add(key)
                    stop(engine)
                    engine = None
        report.add(case, "results")


def main() -> None:
    """Run, and write the findings with the machine and the arguments."""
    job = flags_of(Job, __doc__)
    if job.dry_run:
        job = replace(job, lengths=(64, 128), layers=2, vocabulary=128, steps=1)
    cut = [name for name in job.shapes if replace(SHAPES[name], **job.cut) != SHAPES[name]]
    note = f"{job.layers} layers and a vocabulary of {job.vocabulary}"
    note += f": cut from the models of {', '.join(cut)}" if cut else ", none cut"
    with benchmark(job, note=note, agreement={}, results=[]) as (world, report):
        join_deepspeed(world)
        report.content |= made_with()
        run(job, world, report)


if __name__ == "__main__":
    main()
