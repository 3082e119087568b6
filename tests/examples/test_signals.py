"""Signals to the launcher, to torchrun and to a rank: every rank ends within seconds, with a line, and none is left."""

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
from types import SimpleNamespace

import pytest

from dfa_megatron.doctor import start_ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")

TINY = ("--seq-length", "256", "--hidden-size", "64", "--num-attention-heads", "2", "--num-query-groups", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 5.0
"""In which all must have ended, on a busy machine."""

Training = Callable[..., "subprocess.Popen[str]"]


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


def state(pid: int) -> str:
    """One letter as in /proc; Z where nobody has asked for the exit status, empty where there is no such process."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def seconds_until_none_is_left(pids: list[int]) -> float:
    """How long these processes live on; fails after `SECONDS`."""
    before = time.monotonic()
    while any(state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() - before < SECONDS, f"left after {SECONDS} s: {[(pid, state(pid)) for pid in pids]}"
        time.sleep(0.05)
    return time.monotonic() - before


def rank_of(pid: int) -> str:
    environment = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    return next(item[5:].decode() for item in environment if item.startswith(b"RANK="))


@pytest.fixture
def training(script: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Training]:
    """Start a long run on two ranks, in a process group of its own like a shell's job, and wait for its third step."""
    started: list[tuple[subprocess.Popen[str], list[int]]] = []

    def start(*launcher: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *TINY, "--train-iters", "1000000", "--save-report", "report"],
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
        started.append((process, descendants(process.pid)))
        assert len(started[-1][1]) >= 2, "the ranks are not running"
        return process

    yield start
    for process, below in started:
        for pid in (process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_an_interrupted_run_ends_every_rank(training: Training, tmp_path: Path) -> None:
    name = "SIGINT"  # SIGTERM goes the same way, and is sent below
    launcher = training()
    ranks = descendants(launcher.pid)
    os.killpg(launcher.pid, getattr(signal, name))
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + getattr(signal, name)
    assert errors.strip() == f"{name}: all 2 ranks have ended"
    seconds_until_none_is_left(ranks)
    for line in (tmp_path / "report" / "log.jsonl").read_text().splitlines()[:-1]:
        json.loads(line)


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["our launcher", "torchrun"])
def test_a_killed_launcher_leaves_no_rank_training_not_even_a_stopped_one(
    training: Training, launcher: tuple[str, ...]
) -> None:
    process = training(*launcher)
    ranks = descendants(process.pid)
    os.kill(ranks[-1], signal.SIGSTOP)
    process.kill()
    seconds_until_none_is_left(ranks)


def test_torchrun_that_is_told_to_end_ends_every_rank(training: Training) -> None:
    process = training(*TORCHRUN)
    ranks = descendants(process.pid)
    process.terminate()
    seconds_until_none_is_left([process.pid, *ranks])
    _, errors = process.communicate(timeout=30)
    assert "SIGTERM" in errors


@pytest.mark.parametrize(
    ("codes", "status", "line"),
    [
        ((-9, -15), 137, "rank 0 was ended by SIGKILL; "),
        ((-15, -11, -15), 139, "rank 1 was ended by SIGSEGV; "),
        ((2, -9), 2, ""),  # rank 1 was stopped: rank 0 has said so, and torchrun has killed it at last
        ((-9, -15, 70), 70, "rank 2 ended with exit status 70; "),
        ((1, -15), 1, "rank 0 ended with exit status 1; "),
        ((1, -11), 139, "rank 1 was ended by SIGSEGV; "),
    ],
)
def test_the_last_line_names_the_rank_that_failed_and_no_signal_of_the_launcher_itself(
    codes: tuple[int, ...], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)}
    assert start_ranks._tell_of(failures) == status
    assert capsys.readouterr().err == (f"{line}the other ranks were ended too\n" if line else "")


def test_a_rank_that_a_signal_ends_takes_the_other_with_it_and_is_named(training: Training) -> None:
    name, line = "SIGKILL", "rank 1 was ended by SIGKILL; the other ranks were ended too"
    launcher = training()
    ranks = descendants(launcher.pid)
    os.kill(next(pid for pid in ranks if rank_of(pid) == "1"), getattr(signal, name))
    seconds_until_none_is_left([launcher.pid, *ranks])
    _, errors = launcher.communicate(timeout=30)
    assert errors.strip() == line
    assert launcher.returncode == 128 + getattr(signal, name)
