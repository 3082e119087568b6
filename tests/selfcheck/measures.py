"""What the ranks of tests without a framework compute."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.selfcheck.record import Recorder

WRONG: list[str] = []
"""What goes wrong on rank 1, where the settings do not say it: several worlds then share one start."""


def a_number_is_nan() -> None:
    WRONG.append("nan")


def a_number_is_missing() -> None:
    WRONG.append("missing")


def a_name_is_another() -> None:
    WRONG.append("elsewhere")


def halves(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Each of two ranks holds half of ten numbers; settings say what goes wrong on rank 1."""
    recorder.section = sections[0]
    rank, wrong = dist.get_rank(), None if whole else "".join(WRONG) or settings["wrong"]
    places = torch.arange(10) if whole else torch.arange(10).chunk(2)[rank]
    values = places.double() + 1
    if rank == 1 and wrong == "sleeps":
        Path(settings["pids"]).write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)
    if rank == 1 and wrong == "nan":
        values[2] = float("nan")
    if rank == 1 and wrong == "missing":
        places, values = places[:-1], values[:-1]
    if not (rank == 1 and wrong == "elsewhere"):
        recorder.add("numbers", "count", values, ("token",), {0: places})
    else:
        recorder.add("numbers", "another name", values, ("token",), {0: places})
