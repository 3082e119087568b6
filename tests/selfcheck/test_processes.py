"""The self-check's own processes: a rank that hangs is named with its stack, and none outlives what started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dfa_megatron.selfcheck.case import Case
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, check, check_planted
from dfa_megatron.selfcheck.table import text
from tests.selfcheck import measures

ROOT = Path(__file__).parents[2]


def case(folder: Path, wrong: str, timeout: float = 60.0) -> Case:
    return Case(
        title="ten numbers",
        ranks=2,
        measure="tests.selfcheck.measures:halves",
        settings={"wrong": wrong, "pids": str(folder / "pid")},
        sections={"count": "count"},
        timeout=timeout,
    )


def test_a_value_that_is_no_number_and_one_that_is_missing_are_differences(tmp_path: Path) -> None:
    said = {
        None: "2 ranks compute what one rank computes",
        measures.a_number_is_nan: "count, numbers: count on rank 1, token 7: nan, on one rank 8",
        measures.a_number_is_missing: "count: 1 of 10 entries were computed by no rank",
        measures.a_name_is_another: "another name was computed only where there are several ranks",
    }
    reports = check_planted(case(tmp_path, ""), [[fault] if fault else [] for fault in said])
    for (fault, words), report in zip(said.items(), reports, strict=True):
        assert report.status == (DIFFERS if fault else RIGHT)
        assert words in "\n".join([text(report), *(difference.what for difference in report.comparison.differences)])


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False


def test_a_rank_that_hangs_is_named_with_its_stack_and_ended(tmp_path: Path) -> None:
    report = check(case(tmp_path, "sleeps", timeout=8.0))
    assert report.status == DIFFERS
    for rank in range(2):
        assert f"rank {rank} did not end within 8 s; its stack:" in text(report)
    assert "in halves" in text(report)
    assert not alive(int((tmp_path / "pid").read_text(encoding="utf-8")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_a_check_that_was_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.selfcheck.test_processes import case; "
        f"from dfa_megatron.selfcheck.run_case import check; check(case(Path({str(tmp_path)!r}), 'sleeps', 120.0))"
    )
    started = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    path, deadline = tmp_path / "pid", time.monotonic() + 90
    while not (path.exists() and path.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.1)
    rank = int(path.read_text(encoding="utf-8"))
    assert alive(rank)
    started.send_signal(signal.SIGKILL)
    started.wait()
    deadline = time.monotonic() + 10
    while alive(rank) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(rank)
