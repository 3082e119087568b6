"""Everything at once: options drawn at random, in combinations that no other test names, against dense float64."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron.kernels.reference import ReferenceKernel
from dfa_megatron.testing.fuzz.__main__ import main
from dfa_megatron.testing.fuzz.attempt import attempt
from dfa_megatron.testing.fuzz.draw import GPU_CLASSES, draw


def fuzz(folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run in which nothing failed."""
    report = folder / "report.json"
    status = main([*arguments, "--out", str(report)])
    found: dict[str, Any] = json.loads(report.read_text())
    assert not found["failures"], found["failures"]
    assert status == 0
    return found


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
        "layout dealt",
        "schedule greedy",
        "float16",
    ):
        assert found["features"][feature] >= 3, feature


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_options_drawn_at_random_are_exact_together_or_refused(ranks: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--over", "gloo", "--ranks", str(ranks), "--cases", "16")
    assert found["kinds"]["right"] >= 8


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)])
def test_options_drawn_at_random_are_exact_together_or_refused_on_gpus(ranks: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--over", "nccl", "--device", "cuda", "--ranks", str(ranks), "--cases", "30")
    assert found["kinds"]["right"] >= 8


@pytest.mark.gpu
def test_options_drawn_at_random_are_exact_on_one_gpu(tmp_path: Path) -> None:
    found = fuzz(tmp_path, "--device", "cuda", "--cases", "1000", "--seconds", "60")
    assert found["kinds"]["right"] >= 8


def _ahead(self: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Any, softmax_scale: float) -> Any:
    """A kernel that sees one token too many."""
    wrong = dataclasses.replace(band, right=band.right + 1 if band.right >= 0 else band.right)
    return _right(self, q, k, v, band=wrong, softmax_scale=softmax_scale)


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


def test_a_line_says_all_of_a_case() -> None:
    for number in range(50):
        for over in ("together", "gloo"):
            case = draw(0, number, over, ranks=(2, 4, 6))
            assert draw(0, number, over, ranks=(case.ranks,)) == case
            assert f"--ranks {case.ranks}" in case.line


def _arguments(line: str) -> Sequence[str]:
    words = shlex.split(line)
    assert words[:4] == ["FAILED", "python", "-m", "dfa_megatron.testing.fuzz"]
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
