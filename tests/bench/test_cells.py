"""Sets of cells: what is skipped, begun, ended and written; and the toy set of the paper, which runs."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cells, own_host
from benchmarks.attention.__main__ import job_of
from benchmarks.cell_sets import NEEDS, SETS, Cell
from dfa_megatron.runtime.environment import has_ended
from tests.support.scripts import said_over_ranks

ROOT = Path(__file__).parents[2]


def code(name: str, text: str, seconds: float = 20.0, **more: Any) -> Cell:
    """A cell that runs Python with the cell's own path as its argument."""
    return Cell(name, shlex.join(["python", "-c", text, "{out}"]), seconds, **more)


def by_name(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["name"]: row["status"] for row in rows}


def test_each_cell_is_written_before_the_next_begins_and_has_its_output_and_environment(tmp_path: Path) -> None:
    read = (
        "import os, pathlib, sys; print(os.environ['SAID']); print((pathlib.Path(sys.argv[1]).parent / 'cells.jsonl')"
    )
    chosen = [
        code("first", "import sys; print('gone'); sys.exit(3)"),
        Cell("second", "SAID=it " + code("", f"{read}.read_text())").text, 20.0),
    ]
    rows = cells.run(chosen, tmp_path / "out", 100.0)
    assert by_name(rows) == {"first": "failed", "second": "ran"}
    assert rows[0]["why"] == "exit status 3"
    assert (tmp_path / "out" / "first.log").read_text() == "gone\n"
    said, line = (tmp_path / "out" / "second.log").read_text().split()[0], rows[0]
    assert said == "it"
    assert json.loads((tmp_path / "out" / "second.log").read_text().splitlines()[1]) == line
    assert [json.loads(one) for one in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()] == rows
    assert rows[1]["command"].startswith("SAID=it python -c ")


def test_what_cannot_run_or_would_not_end_within_the_budget_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDS, "needy", ("no_such.package",))
    mark = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    chosen = [
        code("gpus", mark, gpus=99),
        Cell("package", code("", mark).text + " needy", 20.0),
        code("long", mark, seconds=50.0),
        code("short", mark, seconds=10.0),
    ]
    rows = cells.run(chosen, tmp_path, 30.0)
    assert list(by_name(rows).values()) == ["skipped", "skipped", "no time left", "ran"]
    for row, words in zip(rows, ("needs 99 GPUs", "no_such.package is", "may take 50 s"), strict=False):
        assert words in row["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cells.jsonl", "short", "short.log"]


def test_a_cell_over_its_time_is_ended_with_children_that_left_its_session_and_ignore_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "GRACE", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    )
    parent = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(99)"
    )
    rows = cells.run([code("long", parent, seconds=3.0), code("next", "")], tmp_path, 60.0)
    assert by_name(rows) == {"long": "over time", "next": "ran"}
    assert rows[0]["seconds"] < 12
    assert (tmp_path / "long.log").read_text() == "deaf\n"
    assert has_ended(int((tmp_path / "long").read_text()))


def test_every_cell_has_a_name_of_its_own_and_flags_that_its_script_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import deepspeed_longest, megatron_layers

    parsed = {"benchmarks.attention": job_of, "benchmarks.megatron_layers": megatron_layers.flags}
    parsed["benchmarks.deepspeed_longest"] = deepspeed_longest.parse
    for chosen in SETS.values():
        assert len({cell.name for cell in chosen}) == len(chosen)
        for cell in chosen:
            words = cell.command
            at = next(i for i, word in enumerate(words) if word.startswith(("benchmarks", "tests", "pytest")))
            at += words[at] == "benchmarks.own_host"
            assert "-m" in words[:at], shlex.join(words)
            if words[at] in parsed:
                parsed[words[at]](words[at + 1 :])
    assert sum(cell.seconds for cell in SETS["paper"]) <= 1800


def test_ranks_of_a_host_have_its_name_and_the_module_its_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "5", "RANKS_PER_HOST": "4"})
    monkeypatch.setattr(socket, "gethostname", socket.gethostname)
    monkeypatch.delitem(sys.modules, "benchmarks.cells")  # it runs as a module of its own
    monkeypatch.setattr(sys, "argv", ["own_host", "benchmarks.cells", "paper-toy", "--list"])
    with pytest.raises(SystemExit, match=r"^0$"):
        own_host.main()
    assert (os.environ["NCCL_HOSTID"], socket.gethostname()) == ("host-1", "host-1")
    assert "toy-layers" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_the_papers_cells_run_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers on workers, which have imported Megatron before: new processes take 20 seconds for it."""
    pytest.importorskip("megatron.core")
    assert cells.main(["paper-toy", "--only", "toy-ablations", "--out", str(tmp_path), "--budget", "270"]) == 0
    assert "toy-ablations: ran" in capsys.readouterr().out
    (words,) = (cell.command for cell in SETS["paper-toy"] if cell.name == "toy-layers")
    words = [word.replace("{out}", str(tmp_path / "toy-layers")) for word in words]
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
