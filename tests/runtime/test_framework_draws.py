"""The runner of `make fuzz` tells a draw that is right from all others, and goes on after any."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from tests.frameworks.compare import Found
from tests.fuzz import serve
from tests.fuzz.frameworks.steps import run
from tests.fuzz.outcome import Draw, Tally

PRELOADED = ()
REFUSALS = (("expected", "seven of them", lambda draw: draw.number != 3),)

ENDS = ("right", "wrong", "refused", "failed", "failed", "failed", "hung", "refused", "right", "failed", "refused")
"""By number: 3 is refused without a reason, 4 on one rank, 5 fails on one rank, 9 on one rank of one."""
WORDS = {
    1: "1 of 2 differ: weight 2.5e-05",
    2: "expected",
    3: "refused: seven of them",
    4: "ranks differ: rank 0: right ; rank 1: refused expected",
    5: "ArithmeticError: a rank alone",
    7: "documented: so it is",
    9: "on one rank: ",
    10: "no finite numbers on one rank",
}


@dataclass(frozen=True, kw_only=True)
class Imitation(Draw):
    """A step of no framework, which comes to the end of its number."""

    over = "imitated"
    seed: int = 0
    ranks: int = 2  # type: ignore[misc]
    limit: float = 4e-6


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


def test_every_end_of_a_draw_is_told_from_the_others(tmp_path: Path) -> None:
    draws, tally = [Imitation(number=number) for number in range(len(ENDS))], Tally()
    found = {
        draw.number: (tally.add(draw, outcome), outcome)[1] for draw, outcome in run(__name__, draws, 4.0, math.inf)
    }
    assert [found[number].kind for number in range(len(ENDS))] == [*ENDS]
    for number, words in WORDS.items():
        assert words in found[number].reason, number
    assert 0 < found[0].worst < 1
    tally.write(tmp_path / "report.json", seed=0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kinds"] == {"imitated": {kind: ENDS.count(kind) for kind in {*ENDS}}}
    assert report["features"] == {"imitated: 2 ranks": 2}
    assert len(report["failures"]) == 6
    assert "HUNG python -m tests.fuzz --over imitated --seed 0 --case 6" in tally.text()
    assert not tally.succeeded


def _slow(draw: Imitation, rank: int, ranks: int, folder: str) -> None:
    time.sleep(3600)


def test_no_draw_goes_on_when_the_time_of_a_run_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GRACE", 0.0)
    draws, began = [Imitation(number=number) for number in range(1000)], time.monotonic()
    found = serve.run_all(_slow, draws, 1, str(tmp_path), 60.0, began + 8.0)  # type: ignore[arg-type]
    assert [outcome.kind for _, outcome in found] == ["unfinished"]
    assert time.monotonic() - began < 30
