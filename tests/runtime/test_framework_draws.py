"""The runner of `make fuzz-frameworks` tells a step that is right from all others, and goes on after any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.fuzz.frameworks import __main__ as command
from tests.fuzz.frameworks.serve import run
from tests.fuzz.frameworks.tally import Tally
from tests.runtime import imitated_step
from tests.runtime.imitated_step import ENDS, Imitation


def test_every_end_of_a_draw_is_told_from_the_others(tmp_path: Path) -> None:
    draws = [Imitation(number) for number in range(len(ENDS))]
    tally, found = Tally(), {}
    for draw, outcome in run(imitated_step.__name__, draws, 4.0, math.inf):
        tally.add("imitated", draw, outcome)
        found[draw.number] = outcome
    assert [found[number].kind for number in range(len(ENDS))] == [*ENDS]
    for number, words in {
        1: "1 of 2 differ: weight 2.5e-05",
        2: "expected",
        3: "refused: seven of them",
        4: "ranks differ: rank 0: right ; rank 1: refused expected",
        5: "ArithmeticError: a rank alone",
        7: "documented: so it is",
        9: "on one rank: ",
        10: "no finite numbers on one rank",
    }.items():
        assert words in found[number].reason, number
    assert 0 < found[0].worst < 1
    tally.write(tmp_path / "report.json", seed=0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kinds"] == {"imitated": {kind: ENDS.count(kind) for kind in {*ENDS}}}
    assert report["features"] == {"imitated: even": 2}
    assert len(report["failures"]) == 6
    assert "HUNG draw 6" in tally.text()


@pytest.mark.parametrize(("kind", "status"), [("right", 0), ("wrong", 1), ("refused", 1)])
def test_the_command_succeeds_where_draws_are_right_and_none_is_worse(
    kind: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.fuzz.frameworks.outcome import Outcome

    monkeypatch.setattr(command, "prepare", lambda *_: None)
    monkeypatch.setattr(command, "module_of", lambda _: type("Steps", (), {"draw": lambda _, n: Imitation(n)}))
    monkeypatch.setattr(command, "run", lambda _, draws, *__: [(d, Outcome(d.number, kind, "so")) for d in draws])
    assert command.main(["--only", "megatron", "--first", "3", "--cases", "2"]) == status
    assert f"{'megatron':14}" in capsys.readouterr().out
