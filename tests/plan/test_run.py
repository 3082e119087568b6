"""`dfa-megatron run`: plans from files, run in one process and on ranks, and what is no plan."""

from __future__ import annotations

import contextlib
import io
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from dfa_megatron.cli.main import main
from dfa_megatron.masks import prefix_lm
from dfa_megatron.plan import with_blocks
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.text import to_text
from dfa_megatron.testing.workers import run_ranks
from tests.support.groups import as_torchrun_starts, free_port
from tests.support.plan_cases import WAYS, plan_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_by_hand.py"


def test_the_file_that_plan_writes_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    mask = ["--mask", "prefix", "--prefix", "40", "--schedule", "greedy"]
    assert main(["plan", "--ranks", "3", "--seq-length", "96", *mask, "--text", str(path)]) == 0
    assert main(["run", "--plan", str(path), "--batch", "2", "--dtype", "float64"]) == 0
    out = capsys.readouterr().out
    assert "greedy of prefix(40) over 96 tokens on 3 ranks" in out
    assert out.rstrip().endswith("right")


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_of_every_schedule_runs(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of(way, causal(48), 4)))
    assert main(["run", "--plan", str(path), "--kernel", "reference"]) == 0
    assert "on 4 ranks" in capsys.readouterr().out


def test_a_plan_with_other_blocks_is_routed_again_and_runs(tmp_path: Path) -> None:
    plan = plan_of("ring", prefix_lm(48, 20), 4)
    moved = [replace(block, rank=0) if block.rank == 3 and block.step else block for block in plan.forward.blocks]
    path = tmp_path / "a.plan"
    path.write_text(to_text(with_blocks(plan, moved)))
    assert main(["run", "--plan", str(path)]) == 0


def test_a_plan_runs_on_ranks_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of("greedy", prefix_lm(24, 9), 2)))
    assert main(["run", "--plan", str(path), "--ranks", "2"]) == 0
    assert capfd.readouterr().out.rstrip().endswith("right")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  block 0 0 0", "  block 0 zero 0", "line 6 of the plan's text cannot be read: '  block 0 zero 0' (invalid"),
        ("plan ring", "plans ring", "line 1"),
        ("  block 0 0 0\n", "", "R4"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    old: str, new: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of("ring", causal(8), 2)).replace(old, new, 1))
    assert main(["run", "--plan", str(path)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1 or "step r0" in error, "one line, or a plan with its grid"


def test_ranks_that_the_plan_does_not_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of("ring", causal(8), 2)))
    assert main(["run", "--plan", str(path), "--ranks", "3"]) == 2
    assert "the plan is for 2" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    assert main(["run", "--plan", str(path)]) == 2
    assert main(["run", "--plan", str(tmp_path / "none")]) == 2


def test_the_example_changes_a_plan_and_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "3.2*" in said
    assert said.count("equal to attention over the whole sequence") == 1


def said_by_a_rank(rank: int, world_size: int, port: int) -> str:
    as_torchrun_starts(rank, world_size, port)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_the_example_runs_on_four_ranks() -> None:
    for said in run_ranks(4, said_by_a_rank, free_port()):
        assert "3.2*" in said
        assert said.count("equal to attention over the whole sequence") == 1
