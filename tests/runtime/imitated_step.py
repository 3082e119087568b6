"""Steps of no framework, for `tests.fuzz.frameworks`: each draw comes to another end, by its number."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from tests.fuzz.frameworks.outcome import Found

PRELOADED = ("tests.runtime.imitated_step",)
REFUSALS = (("expected", "seven of them", lambda draw: draw.number != 3),)

ENDS = ("right", "wrong", "refused", "failed", "failed", "failed", "hung", "refused", "right", "failed", "refused")
"""By number: 3 is refused without a reason, 4 on one rank, 5 fails on one rank, 9 on one rank of one."""


@dataclass(frozen=True)
class Imitation:
    """A draw."""

    number: int
    ranks: int = 2
    dtype: str = "float64"
    start: tuple[int, ...] = ()

    @property
    def line(self) -> str:
        return f"draw {self.number}"

    def features(self) -> list[str]:
        return ["odd"] if self.number % 2 else ["even"]


def documented(draw: Imitation) -> str:
    return "documented: so it is" if draw.number == 7 else ""


def step(draw: Imitation, rank: int, ranks: int) -> Found:
    first = torch.tensor([4.0, -2.0, 0.001], dtype=torch.float64)
    if draw.number == 9:
        raise ValueError("no such step")
    if draw.number == 10:
        return Found(1.0, {"weight": first / 0}, {})
    if ranks > 1:
        if draw.number in (2, 3) or (draw.number == 4 and rank):
            raise UnsupportedError("seven of them")
        if draw.number == 5 and rank:
            raise ArithmeticError("a rank alone")
        if draw.number == 6 and rank:
            time.sleep(600)
        dist.barrier()
        first = first + torch.tensor([0, 1e-4 if (draw.number, rank) == (1, 1) else 1e-9, 1e-9])
    mine = rank % 2 if ranks > 1 else slice(None)
    held = {0: torch.tensor([mine])} if ranks > 1 else {}
    return Found(
        1.0 if rank == 0 else None, {"weight": first[mine].reshape(-1), "other": first / 1e9}, {"weight": held}
    )
