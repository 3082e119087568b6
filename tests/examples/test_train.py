"""The example as a user runs it: the loss falls, the report is written, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = ("--seq-length", "256", "--hidden-size", "64", "--num-attention-heads", "2", "--num-query-groups", "1")


def test_the_loss_falls_on_two_ranks_and_the_report_is_written(run: Run, tmp_path: Path) -> None:
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


def test_torchrun_starts_the_script_as_well(script: Path, environment: dict[str, str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*TINY, "--train-iters", "1", "--save-report", "report", "--recompute-granularity", "none"]
    done = subprocess.run(
        [*torchrun, str(script), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing was recomputed" in (tmp_path / "report" / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "nowhere.txt"), "--data nowhere.txt: there is no such text file"),
        (("--nproc-per-node", "3"), "--seq-length 4096 cannot be divided by the 3 context-parallel ranks"),
        (("--dfa-agreement-timeout", "-1"), "agreement_timeout=-1.0 is not supported"),
    ],
)
def test_a_wrong_request_is_one_line_and_starts_no_rank(run: Run, flags: tuple[str, ...], message: str) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_what_the_ranks_find_wrong_is_one_line_as_well(run: Run) -> None:
    done = run(*TINY, "--train-iters", "2", "--dfa-layout", "contiguous", "--dfa-schedule", "zigzag")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "zigzag" in done.stderr


def descendants(parent: int) -> list[int]:
    """Every living process below `parent`, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found, new = [], [parent]
    while new:
        new = [child for child, above in parents.items() if above in new]
        found += new
    return found


@pytest.fixture
def training(script: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run on two ranks that has reached its first steps, in a process group of its own like a shell's job."""
    command = [sys.executable, str(script), *TINY, "--train-iters", "1000000", "--save-report", "report"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "report" / "log.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and '"step": 3' in log.read_text():
            break
        time.sleep(0.1)
    below = descendants(process.pid)
    yield process
    for pid in (process.pid, *below):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_an_interrupted_run_ends_every_rank(training: subprocess.Popen[str], name: str, tmp_path: Path) -> None:
    ranks = descendants(training.pid)
    assert len(ranks) >= 2, "the ranks are not running"
    os.killpg(training.pid, getattr(signal, name))
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 128 + getattr(signal, name)
    assert errors.strip() == f"{name}: all 2 ranks have ended"
    deadline = time.monotonic() + 10
    alive = ranks
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
        time.sleep(0.1)
    assert alive == []
    for line in (tmp_path / "report" / "log.jsonl").read_text().splitlines()[:-1]:
        json.loads(line)
