"""`dfa-megatron run`: plans from files, run on ranks, and what is no plan."""

from __future__ import annotations

import contextlib
import io
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.cli import run_plan
from dfa_megatron.cli.main import main
from dfa_megatron.cli.run_plan import RunFlags, compared
from dfa_megatron.doctor import distributed_call, start_ranks
from dfa_megatron.doctor.kernel_trial import Trial, exact
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.masks import prefix_lm
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.text import from_text, to_text
from dfa_megatron.plan.schedules import with_blocks
from tests.support.groups import as_torchrun_starts, free_port
from tests.support.live_bytes import LiveBytes
from tests.support.plan_cases import plan_of
from tests.support.plants import attention_with
from tests.support.workers import over_ranks, run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_by_hand.py"


def test_the_file_that_plan_writes_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    mask = ["--mask", "prefix", "--prefix", "40", "--schedule", "greedy"]
    assert main(["plan", "--ranks", "2", "--seq-length", "96", *mask, "--text", str(path)]) == 0
    assert main(["run", "--plan", str(path), "--batch", "2", "--dtype", "float64"]) == 0
    out = capfd.readouterr().out
    assert "greedy of prefix(40) over 96 tokens on 2 ranks" in out
    assert out.rstrip().endswith("right")


@over_ranks(4)
def test_plans_of_schedules_and_one_with_other_blocks_run_and_what_is_off_is_told(rank: int, ranks: int) -> None:
    here, flags = World(rank, ranks, torch.device("cpu"), dist.group.WORLD), RunFlags(kernel="reference")
    plans = [plan_of(way, causal(48), 4) for way in ("balanced_shared", "zigzag", "load_balanced")]
    ring = plan_of("ring", prefix_lm(48, 20), 4)
    moved = [block._replace(rank=0) if block.rank == 3 and block.step else block for block in ring.forward.blocks]
    for plan in (*plans, with_blocks(ring, moved)):
        assert compared(from_text(to_text(plan)), flags, here)[1] == ""
    with attention_with(distributed_call, softmax_scale=1.0):
        assert compared(from_text(to_text(plans[0])), flags, here)[1] == "out, lse, dq, dk, dv"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("0, 0, 0, 0]", '0, 0, "0", 0]', "line 2 of the plan's text cannot be read: "),
        ('"schedule": ', '"plan": ', "line 1"),
        ('["forward", "block", 0, 0, 0, 0]\n', "", "R4"),
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


def test_ranks_that_the_plan_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of("ring", causal(8), 2)))
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["run", "--plan", str(path)]) == 2
    assert "the plan is for 2" in capsys.readouterr().err
    dist.destroy_process_group()
    path.write_bytes(b"\xff\xfe")
    assert main(["run", "--plan", str(path)]) == 2
    assert main(["run", "--plan", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_whose_comparison_does_not_fit_is_refused_and_what_is_advised_fits(seed: int) -> None:
    draw = random.Random(seed)
    ranks, length = draw.randint(1, 5), draw.randint(64, 3000)
    flags = RunFlags(batch=draw.randint(1, 3), heads=draw.choice([1, 2, 4]), kv_heads=1)
    needed = ranks * (run_plan._PROCESS + 7 * 8 * flags.batch * flags.heads * length**2)
    run_plan._refuse_beyond(needed, plan_of("ring", causal(length), ranks), flags)
    with pytest.raises(UnsupportedError, match=f"a plan over {length:,} tokens: dense") as told:
        run_plan._refuse_beyond(needed - 1, plan_of("ring", causal(length), ranks), flags)
    most = int(str(told.value).split("--seq-length ")[1].rstrip("."))
    assert 0.8 * length - 2 * ranks < most < length
    run_plan._refuse_beyond(needed - 1, plan_of("ring", causal(most), ranks), flags)
    with pytest.raises(UnsupportedError, match=r"and 0.0 are free.*fewer heads, or a machine with more memory"):
        run_plan._refuse_beyond(-1, plan_of("ring", causal(length), ranks), flags)


def test_the_command_looks_at_the_memory_that_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.plan"
    path.write_text(to_text(plan_of("ring", causal(1 << 20), 2)))
    assert main(["run", "--plan", str(path)]) == 2
    assert "a plan over 1,048,576 tokens: dense attention" in capsys.readouterr().err
    start_ranks._tell_of({0: SimpleNamespace(exitcode=-15), 1: SimpleNamespace(exitcode=-9)})
    assert "rank 1 was ended by SIGKILL: perhaps the machine is out of memory" in capsys.readouterr().err


def test_dense_attention_holds_no_more_matrices_than_are_counted() -> None:
    trial = Trial.square(1024, 4, 1, 32, torch.float32, "cpu", 1)
    inputs = trial.inputs()
    with LiveBytes() as live:
        exact(inputs, causal(1024), 0.0)
    assert 4 < live.peak / (8 * 4 * 1024**2) < run_plan._COPIES


def said_by_a_rank(rank: int, world_size: int, port: int) -> str:
    as_torchrun_starts(rank, world_size, port)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def test_the_example_changes_a_plan_and_runs_it_on_one_and_on_four_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "3.2*" in capsys.readouterr().out
    for said in run_ranks(4, said_by_a_rank, free_port()):
        assert "3.2*" in said
        assert said.count("equal to attention over the whole sequence") == 1
