"""What every benchmark does: take flags, join ranks, time calls, and write figures beside the machine they are of."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.doctor.machine import devices, versions
from dfa_megatron.doctor.world import World, join, own_device, slowest, stopwatch
from dfa_megatron.flags import add_flags, flag, from_flags

T = TypeVar("T")
Call = Callable[[], object]


@dataclass(frozen=True)
class Flags:
    """What every benchmark is told."""

    device: str = flag("auto", "where", choices=("auto", "cuda", "cpu"))
    out: Path | None = flag(None, "a JSON file of the figures, written again after each")


def flags_of(cls: type[T], about: str | None, argv: Sequence[str] | None = None) -> T:
    """Return a dataclass of flags (`dfa_megatron.flags`) as the command line sets it."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, cls)
    return from_flags(cls, parser.parse_args(argv))


@contextlib.contextmanager
def benchmark(flags: Any, patience: float = 300.0, **content: Any) -> Iterator[tuple[World, Report]]:
    """Join the ranks that a launcher started, and leave them at the end; alone there is no process group.

    patience: seconds that a collective waits. content: what the report says beside the machine and the flags.
    """
    begun, device = dist.is_initialized(), getattr(flags, "device", "auto")
    alone = not begun and "RANK" not in os.environ
    world = World(0, 1, own_device(device), None) if alone else join(device, patience)  # type: ignore[arg-type]
    yield world, Report(flags.out, flags, **content)
    if dist.is_initialized() and not begun:
        dist.barrier()
        dist.destroy_process_group()


class Report:
    """The figures of a run; the first rank shows each row, and writes the file again after it.

    So a run that is cut short has its first rows. Without a file they are only shown.
    """

    def __init__(self, out: Path | None, arguments: object, **more: Any) -> None:
        self.out, self.first = out, not dist.is_initialized() or dist.get_rank() == 0
        self.began = time.perf_counter()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        given = {name: x.name if isinstance(x, Path) else str(x) for name, x in vars(arguments).items()}
        self.content: dict[str, Any] = {"machine": {"ranks": ranks, **machine()}, "arguments": given, **more}

    def add(self, row: dict[str, Any], part: str = "rows", said: str = "") -> None:
        """Add a row to a part, show it, or what is said of it, and write the file."""
        self.content.setdefault(part, []).append(row)
        self.show(said or row)
        self.write()

    def show(self, what: str | dict[str, Any]) -> None:
        """Print a text or a row."""
        if self.first:
            print(what if isinstance(what, str) else json.dumps(what, default=str), flush=True)

    @property
    def seconds(self) -> float:
        """Return how long the run has taken, on the slowest rank."""
        return slowest([time.perf_counter() - self.began])[0]

    def write(self) -> None:
        """Write the file."""
        self.content["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.first and self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.out.with_suffix(".part")  # a reader sees the old file or the new one
            fresh.write_text(json.dumps(self.content, indent=1, default=str) + "\n", encoding="utf-8")
            fresh.replace(self.out)


def machine() -> dict[str, Any]:
    """Return the surroundings that a figure depends on: device, versions, NCCL's and CUDA's environment."""
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_DEVICE_MAX"))}
    gpus = devices()
    where = {"device": gpus[0]["name"], "memory_gib": gpus[0]["gib"]} if gpus else {"device": platform.machine()}
    return where | {"versions": versions(), "environment": told}


def share_gpus(rank: int, ranks: int) -> None:
    """Choose the GPU of a rank, one of so many on this machine, before NCCL starts.

    Ranks share GPUs where these are fewer. NCCL refuses that on one host, so each rank is then told that it is a host.
    """
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % gpus)


def dtype_on(device: torch.device) -> torch.dtype:
    """Return what is measured by default: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(call: Call, device: torch.device, *, warmup: int = 2, repeats: int) -> float:
    """Return the milliseconds of a call by the device's clock: the median of the slowest rank."""
    times = [stopwatch(call, device) for _ in range(warmup + repeats)]
    return 1e3 * slowest([statistics.median(times[warmup:])])[0]


def clear_memory() -> None:
    """Give back what is free on this rank's GPU, and count its peak anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Return the most that PyTorch's allocator has held since then, the largest of all ranks; 0 on CPU.

    The copy engines' memory, where they carry our messages, comes on top.
    """
    return slowest([torch.cuda.max_memory_allocated() / 2**30])[0] if torch.cuda.is_available() else 0.0


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| over |want|, in float64."""
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())
