"""Everything at once: options drawn at random, in combinations that no other test names, against dense float64."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import multiprocessing
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.api import BlockCall
from dfa_megatron.kernels.segments import Segments
from tests.fuzz import in_one_process as jobs
from tests.fuzz.__main__ import main
from tests.fuzz.attempt import attempt
from tests.fuzz.random_case import GPU_CLASSES, draw


def fuzz(folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run in which nothing failed."""
    report = folder / "report.json"
    status = main([*arguments, "--out", str(report)])
    found: dict[str, Any] = json.loads(report.read_text())
    assert not found["failures"], found["failures"]
    assert status == 0
    return found


@pytest.mark.support(
    "runtime",
    "options drawn at random, many at once: masks, packs, sinks, caps, ALiBi, heads exchanged, every checkpoint",
)
def test_options_drawn_at_random_are_exact_in_one_process(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--cases", "120")
    assert found["kinds"]["right"] >= 80
    for feature in (
        "9 ranks",
        "sinks",
        "ALiBi",
        "softcap",
        "window",
        "pack",
        "layout load_balanced",
        "schedule greedy",
        "float16",
    ):
        assert found["features"][feature] >= 3, feature
    assert sum(count for name, count in found["features"].items() if name.startswith("mask ")) >= 10


@pytest.mark.support(
    "runtime",
    "options drawn at random, many at once: masks, packs, sinks, caps, ALiBi, heads exchanged, every checkpoint",
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_options_drawn_at_random_are_exact_together_or_refused(ranks: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--over", "gloo", "--ranks", str(ranks), "--cases", "16")
    assert found["kinds"]["right"] >= 8


@pytest.mark.support(
    "runtime",
    "options drawn at random, many at once: masks, packs, sinks, caps, ALiBi, heads exchanged, every checkpoint",
)
@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)])
def test_options_drawn_at_random_are_exact_together_or_refused_on_gpus(ranks: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--over", "nccl", "--device", "cuda", "--ranks", str(ranks), "--cases", "30")
    assert found["kinds"]["right"] >= 8


@pytest.mark.support(
    "runtime",
    "options drawn at random, many at once: masks, packs, sinks, caps, ALiBi, heads exchanged, every checkpoint",
)
@pytest.mark.gpu
def test_options_drawn_at_random_are_exact_on_one_gpu(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--device", "cuda", "--cases", "1000", "--seconds", "60")
    assert found["kinds"]["right"] >= 8


def _ahead(self: object, call: BlockCall) -> Any:
    """A kernel that sees one token too many."""
    whole = call.segments
    parts = tuple(
        dataclasses.replace(s, band=dataclasses.replace(s.band, right=s.band.right + (s.band.right >= 0)))
        for s in whole.parts
    )
    return _right(self, dataclasses.replace(call, segments=Segments(parts, whole.q_len, whole.kv_len)))


_right = ReferenceKernel.forward


def test_a_planted_fault_is_found_and_its_line_finds_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceKernel, "forward", _ahead)
        assert main(["--cases", "12", "--ranks", "3", "5"]) == 1
        failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED python")]
        assert failures
        again = _arguments(failures[0])
        assert main(again) == 1
        assert "wrong, in units of the tolerance" in capsys.readouterr().out
    assert main(again) == 0, "without the fault it is right"


_PLANTS = """
import multiprocessing, os, time
from tests.fuzz.random_case import draw

def drawn(number):
    case = draw(0, number, "together")
    if multiprocessing.parent_process() and number == 2:
        os._exit(9)
    if multiprocessing.parent_process() and number == 5:
        object.__setattr__(case, "offsets", Hangs())
    return case

class Hangs:
    def __getitem__(self, at): time.sleep(3600)
"""
"""Case 2 ends its process, and case 5 hangs."""


def test_a_process_that_dies_or_hangs_loses_one_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plants.py").write_text(_PLANTS)
    monkeypatch.syspath_prepend(tmp_path)
    drawn = importlib.import_module("plants").drawn
    verdicts = {case.number: verdict for case, verdict in jobs.run_jobs(drawn, range(6), 2, limit=5, deadline=math.inf)}
    assert sorted(verdicts) == list(range(6))
    assert [number for number, verdict in verdicts.items() if verdict.kind == "failed"] == [2, 5]
    assert "the process ended with 9" in verdicts[2].reason
    assert "no end within 5 s: python -m tests.fuzz --seed 0 --case 5" in verdicts[5].reason
    assert "__getitem__" in verdicts[5].reason, "the stack is told"


def test_no_process_goes_on_when_the_time_of_a_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "GRACE", 0.0)
    began = time.monotonic()
    cases = functools.partial(draw, 0, over="together")
    found = [verdict.kind for _, verdict in jobs.run_jobs(cases, range(10**6), 2, limit=60, deadline=began)]
    assert found == ["unfinished"] * 2
    assert time.monotonic() - began < 60
    assert not multiprocessing.active_children()


def test_a_line_says_all_of_a_case() -> None:
    for number in range(50):
        for over in ("together", "gloo"):
            case = draw(0, number, over, ranks=(2, 4, 6))
            assert draw(0, number, over, ranks=(case.ranks,)) == case
            assert f"--ranks {case.ranks}" in case.line


def _arguments(line: str) -> Sequence[str]:
    words = shlex.split(line)
    assert words[:4] == ["FAILED", "python", "-m", "tests.fuzz"]
    return words[4:]


def test_cases_for_a_gpu_are_right_or_refused_on_a_cpu() -> None:
    """The shapes and options of a run on a GPU, with its kernels replaced."""
    cases = [draw(0, number, "together", "cuda") for number in range(400)]
    shapes = {(c.dtype, c.heads, c.kv_heads, c.head_dim, c.head_dim_v, c.options["softcap"]) for c in cases}
    assert len(shapes) == len({dataclasses.replace(shape, deterministic=False) for shape in GPU_CLASSES})
    done = 0
    for case in cases:
        if case.tokens <= 130 and not case.compiled and done < 25:
            options = case.options | {"kernel": "auto", "cuda_graph": False}
            verdict = attempt(dataclasses.replace(case, device="cpu", options=options))
            assert verdict.kind in ("right", "refused"), verdict
            done += verdict.kind == "right"
    assert done == 25
