"""Sets of measurements: their commands, a cell that fails or takes too long, and the paper's toy set, which runs."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import own_host
from benchmarks.attention.__main__ import job_of
from tests.support.scripts import said_over_ranks

ROOT = Path(__file__).parents[2]
SETS = ("paper", "paper-toy", "one-gpu", "two-gpus", "four-gpus", "eight-gpus")


def sets(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    given = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | environment
    script = ["bash", str(ROOT / "benchmarks" / "sets.sh"), *words]
    return subprocess.run(script, env=given, capture_output=True, text=True, timeout=250, cwd=ROOT, check=False)


def commands(name: str, out: Path) -> dict[str, tuple[int, list[str]]]:
    """Seconds and words of each cell of a set."""
    found = {}
    for line in sets(name, str(out), LIST="1").stdout.splitlines():
        cell, seconds, *words = shlex.split(line)
        assert cell not in found
        found[cell] = int(seconds), words
    return found


def test_every_cell_has_flags_that_its_script_takes(tmp_path: Path) -> None:
    from benchmarks import deepspeed_longest, megatron_layers

    parsed = {"benchmarks.attention": job_of, "benchmarks.megatron_layers": megatron_layers.flags}
    parsed["benchmarks.deepspeed_longest"] = deepspeed_longest.parse
    for name in SETS:
        for cell, (seconds, words) in commands(name, tmp_path).items():
            at = next(i for i, word in enumerate(words) if word.startswith(("benchmarks.", "tests.", "pytest")))
            at += words[at] == "benchmarks.own_host"
            assert "-m" in words[:at], cell
            assert not any("{" in word for word in words), cell
            assert seconds <= 570
            if words[at] in parsed:
                parsed[words[at]](words[at + 1 :])
    assert sum(seconds for seconds, _ in commands("paper", tmp_path).values()) <= 1800


def test_a_cell_that_fails_or_takes_too_long_does_not_keep_the_others(tmp_path: Path) -> None:
    """In place of Python stands a script: one cell fails, one sleeps, the next ones run."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *schedules*) exit 3;; *33h*) sleep 60;; esac\n')
    python.chmod(0o755)
    short = tmp_path / "timeout"
    short.write_text('#!/bin/sh\nshift 3\nexec /usr/bin/timeout -k 1 2 "$@"\n')
    short.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = sets("paper", str(out), "paper-33h", "paper-schedules", "paper-gqa", PYTHON=str(python), PATH=path)
    said = {line.split(":")[0]: line.split()[2] for line in ran.stdout.splitlines()}
    assert said == {"paper-33h": "124", "paper-schedules": "3", "paper-gqa": "0"}
    assert ran.returncode == 1
    assert (
        (out / "paper-schedules.log")
        .read_text()
        .endswith(f"--budget 100 --out {out}/paper-schedules --preset schedules\n")
    )
    assert sets("papers", str(out)).returncode == 2


def test_ranks_of_a_host_have_its_name_and_the_module_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "5", "RANKS_PER_HOST": "4"})
    monkeypatch.setattr(socket, "gethostname", socket.gethostname)
    monkeypatch.setattr(sys, "argv", ["own_host", "benchmarks.indexed", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        own_host.main()
    assert (os.environ["NCCL_HOSTID"], socket.gethostname()) == ("host-1", "host-1")
    assert "--topk" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_the_papers_cells_run_at_toy_size(tmp_path: Path) -> None:
    """The layers on workers, which have imported Megatron before: new processes take 20 seconds for it."""
    pytest.importorskip("megatron.core")
    ran = sets("paper-toy", str(tmp_path), "toy-ablations")
    assert ran.stdout.startswith("toy-ablations: status 0")
    _, words = commands("paper-toy", tmp_path)["toy-layers"]
    said_over_ranks(2, tmp_path, *words[words.index("benchmarks.megatron_layers") :])
    layers = json.loads((tmp_path / "toy-layers.json").read_text())["layers"]
    found = {(row["heads"], row["mode"]): "ms_per_layer" in row or row["cannot"].split()[0] for row in layers}
    assert found == {(33, "tp-te-full"): "2", (33, "tp-full"): "2", (33, "full"): True, (33, "remat"): True}
    content = json.loads((tmp_path / "toy-ablations" / "results.json").read_text())
    assert [row["state"] for row in content["rows"]] == ["timed"] * 5
    assert content["machine"]["versions"]["torch"] == torch.__version__
    assert content["arguments"]["seq_length"] == "(64,)"
    shown = (tmp_path / "toy-ablations.log").read_text()
    assert "[1/1]" in shown
    assert shown.count("ours / best baseline") == 1
    assert (tmp_path / "toy-ablations" / "tables.txt").read_text() in shown
