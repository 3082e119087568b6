"""The example as a user runs it: the loss falls, the report is written, and what is wrong is said in one line."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from gpt.errors import UserError
from gpt.flags import parse_flags, settle
from gpt.report import Report
from gpt.text import ByteText
from tests.support.groups import free_port, run_script
from tests.support.workers import run_ranks

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = ("--seq-length", "256", "--hidden-size", "64", "--num-attention-heads", "2", "--num-query-groups", "1")
ALONE = ("--nproc-per-node", "1")


def test_the_loss_falls_on_two_ranks_and_the_report_is_written(
    run: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    del environment["TORCHDYNAMO_DISABLE"]  # once as a user runs it
    done = run(*TINY, "--train-iters", "12", "--save-report", "report", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "report" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert steps[0]["loss"] > 5.0
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0
    assert records[0]["event"] == "start"
    assert records[-1]["event"] == "end"
    assert (tmp_path / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr

    layers, micro_batches = 2, 12
    for counters in records[-1]["counters"]:  # each attention ran once, although its layer was recomputed
        assert counters["attention_forwards"] == counters["attention_backwards"] == layers * micro_batches
        assert counters["replays"] == layers * micro_batches
    summary = (tmp_path / "report" / "summary.txt").read_text()
    assert "attention ran 24 times for 24 layers x micro-batches of rank 0: 1.00 each" in summary
    assert "2 ranks" in summary
    assert summary in done.stdout


def test_ranks_that_torchrun_starts_train_and_write_the_report(script: Path, tmp_path: Path) -> None:
    """test_signals.py has torchrun itself."""
    flags = (*TINY, "--train-iters", "1", "--save-report", "report", "--recompute-granularity", "none")
    run_ranks(2, run_script, free_port(), str(script), str(tmp_path), flags, timeout=120)
    assert "nothing was recomputed" in (tmp_path / "report" / "summary.txt").read_text()


def test_a_wrong_request_is_one_line_and_starts_no_rank(run: Run) -> None:
    done = run("--dfa-ulysses-degree", "0")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "ulysses_degree=0 is not supported" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "nowhere.txt"), "--data nowhere.txt: there is no such text file"),
        (("--nproc-per-node", "3"), "--seq-length 4096 cannot be divided by the 3 context-parallel ranks"),
        (("--save-report", "/dev/null/report"), "cannot write into --save-report /dev/null/report: Not a directory"),
    ],
)
def test_what_is_wrong_is_said_in_words(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train.main(list(flags))


def test_what_the_ranks_find_wrong_is_one_line_as_well(run: Run) -> None:
    done = run(*TINY, "--train-iters", "2", "--dfa-data-layout", "zigzag", "--dfa-schedule", "balanced")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "zigzag" in done.stderr


def test_a_disk_that_fills_up_is_one_line(script: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """No file may grow beyond 8 KiB: the log reaches that after some thirty steps."""
    before = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            *TINY,
            "--train-iters",
            "1000",
            "--save-report",
            "report",
            "--nproc-per-node",
            "1",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)),
    )
    assert done.stderr == "train.py: cannot write report/log.jsonl: File too large\n"
    assert done.returncode == 2
    assert time.monotonic() - before < 100


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_standard_output_that_takes_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse_flags(["--save-report", str(tmp_path)])
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        with pytest.raises(UserError, match="cannot write to the standard output: No space left on device"):
            Report(args, settle(args, 2, cuda=False), ByteText("a", b"a"), torch.device("cpu"), None)
        with contextlib.suppress(OSError):
            full.close()
