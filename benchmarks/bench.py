"""What every benchmark does: take its flags, time calls, and write figures beside the machine that they are of."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.surroundings import machine
from dfa_megatron.doctor.world import World, join, own_device, slowest, stopwatch
from dfa_megatron.flags import add_flags, from_flags

T = TypeVar("T")
Call = Callable[[], object]


def flags_of(cls: type[T], about: str | None, argv: Sequence[str] | None = None) -> T:
    """Return a dataclass of flags (`dfa_megatron.flags`) as the command line sets it."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, cls)
    return from_flags(cls, parser.parse_args(argv))


def ranks_or_one(device: str = "auto", patience: float = 300.0) -> World:
    """Join the ranks that a launcher started; alone there is no process group."""
    if "RANK" in os.environ or dist.is_initialized():
        return join(device, patience)
    return World(0, 1, own_device(device), None)  # type: ignore[arg-type]


def leave() -> None:
    """End the process groups once every rank is here."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Report:
    """The figures of a run; the first rank shows each row, and writes the file again after it.

    So a run that is cut short has its first rows. Without a file they are only shown.
    """

    def __init__(self, out: Path | None, arguments: object, **more: Any) -> None:
        self.out, self.first = out, not dist.is_initialized() or dist.get_rank() == 0
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

    def write(self) -> None:
        """Write the file."""
        if self.first and self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.out.with_suffix(".part")  # a reader sees the old file or the new one
            fresh.write_text(json.dumps(self.content, indent=1, default=str) + "\n", encoding="utf-8")
            fresh.replace(self.out)


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_ms(call: Call, device: torch.device, *, warmup: int = 2, repeats: int) -> float:
    """Return the milliseconds of a call by the device's clock: the median of the slowest rank."""
    times = [stopwatch(call, device) for _ in range(warmup + repeats)]
    return 1e3 * slowest([statistics.median(times[warmup:])])[0]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| over |want|, in float64."""
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())
