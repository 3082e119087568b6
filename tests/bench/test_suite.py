"""The runner of every GPU test and measurement: order, time, failures and skips, and commands that parse."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("suite")


def stage(suite: ModuleType, name: str, code: str, **more: Any) -> Any:
    """One that runs a line of Python."""
    settings = {"minutes": 1, "limit": 60.0, "gpus": 0, **more}
    return suite.Stage(name, "a toy", [sys.executable, "-S", "-c", code], **settings)


def test_stages_run_in_order_and_a_failure_stops_none(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = f"open({str(tmp_path / 'order')!r}, 'a').write"
    toys = [
        stage(suite, "first", f"{note}('1')"),
        stage(suite, "broken", f"{note}('2'); raise SystemExit('it broke')"),
        stage(suite, "lacking", f"{note}('3')", needs=("no_such_module",)),
        stage(suite, "scriptless", f"{note}('4')", files=(tmp_path / "no_such.py",)),
        stage(suite, "wide", f"{note}('5')", gpus=9),
        stage(suite, "last", f"import os; {note}(os.environ['TOY'])", environment={"TOY": "6"}),
    ]
    monkeypatch.setattr(suite, "stages", lambda gpus, out: toys)
    out = tmp_path / "out"
    assert suite.main(["--gpus", "2", "--out", str(out)]) == 1
    assert (tmp_path / "order").read_text() == "126"
    summary = json.loads((out / "summary.json").read_text())
    became = {one["stage"]: (one["status"], one["why"]) for one in summary["stages"]}
    assert became == {
        "first": ("passed", ""),
        "broken": ("failed", "exit status 1: it broke"),
        "lacking": ("skipped", "not here: no_such_module"),
        "scriptless": ("skipped", "not here: no_such.py"),
        "wide": ("skipped", "needs 9 GPUs, 2 here"),
        "last": ("passed", ""),
    }
    shown = capsys.readouterr().out
    assert "[2/6] broken" in shown
    assert "broken.log exit status 1: it broke" in shown
    assert sorted(file.name for file in out.iterdir()) == ["broken.log", "first.log", "last.log", "summary.json"]
    assert suite.main(["--gpus", "2", "--out", str(out), "--only", "last", "first"]) == 0
    assert (tmp_path / "order").read_text() == "12616"


def test_what_a_stage_started_ends_with_it_when_its_time_is_over(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "GRACE", 0.5)
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    deaf = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"subprocess.Popen([sys.executable, '-S', '-c', {child!r}], start_new_session=True); time.sleep(300)"
    )
    outcomes = suite.run_all([stage(suite, "deaf", deaf, limit=3.0)], 0, tmp_path, None)
    assert [one.status for one in outcomes] == ["timed out"]
    assert outcomes[0].seconds < 30
    deadline = time.monotonic() + 10
    while alive(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(pid.read_text()))


def test_what_a_failing_stage_leaves_running_is_ended_too(suite: ModuleType, tmp_path: Path) -> None:
    left = "import subprocess, sys; subprocess.Popen(['sleep', '300'], start_new_session=True); raise SystemExit(3)"
    begin = time.monotonic()
    assert suite.run(stage(suite, "leaving", left), tmp_path, None, threading.Event()).status == "failed"
    assert not suite.marked(f"{os.getpid()}-leaving")
    assert time.monotonic() - begin < suite.GRACE  # it was asked to end, and did


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_budget_cuts_the_stage_it_ends_in_and_names_those_that_it_leaves_out(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "GRACE", 0.5)
    toys = [stage(suite, "long", "import time; time.sleep(300)"), stage(suite, "left", "pass")]
    outcomes = suite.run_all(toys, 0, tmp_path, 1.0)
    assert [(one.status, one.why) for one in outcomes] == [
        ("timed out", "ended after 1 s, the last of --budget"),
        ("not run", "the 1 s of --budget are spent"),
    ]


def test_tests_of_one_gpu_run_side_by_side_and_nothing_else_does(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    meet = (
        "import os, pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "device = os.environ['CUDA_VISIBLE_DEVICES']\n"
        "(here / f'is-{device}').touch()\n"
        "end = time.monotonic() + 30\n"
        "while len(list(here.glob('is-*'))) < 2 and time.monotonic() < end: time.sleep(0.01)\n"
        "raise SystemExit(0 if len(list(here.glob('is-*'))) == 2 else 'alone')"
    )
    alone = f"import pathlib; pathlib.Path({str(tmp_path / 'third')!r}).write_text('ran')"
    toys = [
        stage(suite, "one", meet, beside=True),
        stage(suite, "two", meet, beside=True),
        stage(suite, "three", alone, beside=True),
        stage(suite, "four", "import os; raise SystemExit(os.environ['CUDA_VISIBLE_DEVICES'] != '5,7')"),
    ]
    assert [[one.name for one in some] for some in suite.groups(toys, 2)] == [["one", "two"], ["three"], ["four"]]
    outcomes = suite.run_all(toys, 2, tmp_path, None)
    assert [(one.stage, one.status) for one in outcomes] == [(toy.name, "passed") for toy in toys]
    assert sorted(file.name for file in tmp_path.glob("is-*")) == ["is-5", "is-7"]


def test_the_keyboard_ends_stages_that_run_side_by_side(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys = [stage(suite, name, "import time; time.sleep(300)", beside=True) for name in ("one", "two")]
    toys.append(stage(suite, "left", "pass"))
    monkeypatch.setattr(suite, "wait", lambda begun: (_ for _ in ()).throw(KeyboardInterrupt))
    outcomes = suite.run_all(toys, 2, tmp_path, None)
    assert [one.status for one in outcomes] == ["interrupted", "interrupted", "not run"]
    assert not suite.marked(f"{os.getpid()}-one")


def test_a_stage_that_does_not_exist_is_refused_with_those_that_do(suite: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no stage kernel; there are kernels-flash4, kernels-triton"):
        suite.main(["--only", "kernel", "--list", "--gpus", "4"])


PARSE = """
import argparse, json, runpy, sys
real = argparse.ArgumentParser.parse_args
def parse(self, args=None, namespace=None):
    real(self, args, namespace)
    raise SystemExit(77)
argparse.ArgumentParser.parse_args = parse
for name, module, arguments in json.load(sys.stdin):
    sys.argv = [module, *arguments]
    try:
        (runpy.run_path if module.endswith(".py") else runpy.run_module)(module, run_name="__main__")
    except SystemExit as end:
        print(name, end.code, flush=True)
"""


def test_every_script_takes_the_arguments_that_it_is_given(suite: ModuleType, tmp_path: Path) -> None:
    calls = []
    for one in suite.stages(4, tmp_path):
        words = one.command
        if "torch.distributed.run" in words:
            assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
            words = [words[0], *words[6:]]
        module, *arguments = words[2:] if words[1] == "-m" else words[1:]
        if module != "pytest" and not suite.absence(one, 4):
            calls.append((one.name, module, arguments))
    assert {"doctor", "bench-grid", "packed"} <= {name for name, *_ in calls}  # these need no package
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE], input=json.dumps(calls), cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    ends = [line for line in done.stdout.splitlines() if line.split()[0] in {name for name, *_ in calls}]
    assert ends == [f"{name} 77" for name, *_ in calls], done.stderr[-2000:]


def test_every_gpu_test_is_in_a_stage(suite: ModuleType, tmp_path: Path) -> None:
    """Folders are those that the stages name, and pytest takes the options."""
    named = [word for one in suite.stages(4, tmp_path) if "pytest" in one.command for word in one.command]
    paths = [word for word in named if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths)
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "mark.gpu" in file.read_text(encoding="utf-8") and file != Path(__file__):
            assert any(str(file.relative_to(ROOT)).startswith(path) for path in paths), file
    remat = next(one for one in suite.stages(4, tmp_path) if one.name == "remat")
    command = [*remat.command, "--collect-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    lines = (tmp_path / "support-remat.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 1
    assert all(json.loads(line)["gpu"] for line in lines[1:])
