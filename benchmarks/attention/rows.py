"""The rows of a benchmark and the files they are kept in, written anew after every cell."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

import dfa_megatron
from benchmarks.attention.job import Job
from benchmarks.attention.progress import Progress
from dfa_megatron.doctor.world import World

PACKAGES = (
    "torch", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels",
    "flash-attn", "ring-flash-attn", "yunchang", "deepspeed", "transformer-engine", "megatron-core", "numpy",
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """One method on one attention at one length; times are medians over repetitions of the slowest rank.

    state: "timed"; "refused", "wrong", "out of memory", "failed" or "dropped", and `why` says more.
    forward_ms, both_ms: milliseconds of a forward alone, and of a forward and its backward. tflops: per rank.
    host_ms: until the call has returned to Python; where that is near the time itself, launches decide it.
    inputs_gib: q, k, v and dout of a rank. beyond_gib: the most that the method needs beside them at once, out, dq, dk
        and dv and our transport's symmetric memory included. peak_gib: both together. outside_gib: what it took past
        PyTorch's allocator meanwhile.
    sent_mib: what the rank that sends most sends in a forward and its backward; counted for our methods only.
    took: the schedule that "auto" came to.
    error: the largest relative error of out, dq, dk and dv on a short sequence.
    times: every repetition, by pass.
    """

    method: str
    kind: str
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    window: int
    dtype: str
    seq_length: int
    state: str = ""
    why: str = ""
    note: str = ""
    took: str = ""
    error: float = 0.0
    forward_ms: float = 0.0
    both_ms: float = 0.0
    forward_tflops: float = 0.0
    both_tflops: float = 0.0
    forward_host_ms: float = 0.0
    both_host_ms: float = 0.0
    inputs_gib: float = 0.0
    beyond_gib: float = 0.0
    peak_gib: float = 0.0
    outside_gib: float = 0.0
    sent_mib: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, str, int, str]:
        """What rows of one table share."""
        return self.heads, self.kv_heads, self.head_dim, self.mask, self.window, self.dtype


class Record:
    """The rows so far; on rank 0 also files in a folder, and lines for whoever waits."""

    def __init__(self, job: Job, world: World, progress: Progress | None, absent: Sequence[str] = ()) -> None:
        self.job, self.progress, self.absent = job, progress, absent
        self.machine = machine(world)
        self.rows: list[Row] = []
        self._told = 0
        if progress is not None:
            for why in absent:
                progress.say(f"not compared with {why}")

    def add(self, row: Row) -> None:
        """Keep a row."""
        self.rows.append(row)

    def cell_done(self, seconds_left: float) -> None:
        """Tell of the rows since the last call, and write the files."""
        if self.progress is not None:
            self.progress.advance(self.rows[self._told :], seconds_left)
            self.write()
        self._told = len(self.rows)

    def write(self) -> None:
        """results.json and results.csv, each replaced at once."""
        folder = Path(self.job.out)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": self.machine,
            "arguments": asdict(self.job),
            "not_compared": list(self.absent),
            "rows": [asdict(row) for row in self.rows],
        }
        _replace(folder / "results.json", json.dumps(content, indent=1) + "\n")
        names = [spec.name for spec in fields(Row) if spec.name != "times"]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(names)
        table.writerows([getattr(row, name) for name in names] for row in self.rows)
        _replace(folder / "results.csv", text.getvalue())


def machine(world: World) -> dict[str, Any]:
    """What the figures depend on beside the arguments: device, versions, and the environment of NCCL and CUDA."""
    versions = {"dfa_megatron": dfa_megatron.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with its build
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_DEVICE_MAX"))}
    where: dict[str, Any] = {"ranks": world.size, "device": platform.processor() or platform.machine()}
    if world.cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["cudnn"] = str(torch.backends.cudnn.version())
        where["device"] = torch.cuda.get_device_name()
        where["memory_gib"] = round(torch.cuda.get_device_properties(world.device).total_memory / 2**30, 1)
    return where | {"versions": versions, "environment": told}


def _replace(path: Path, text: str) -> None:
    """A reader, and a run that is killed now, sees the old file or the new one."""
    fresh = path.with_name(path.name + ".part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
