"""Everything at once: options drawn at random, in combinations that no other test names, against dense float64."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.kernels import BlockCall
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.segments import Segments
from tests.fuzz.__main__ import main
from tests.fuzz.attempt import attempt
from tests.fuzz.random_case import GPU_CLASSES, draw
from tests.support.workers import by_turns

drawn_at_random = pytest.mark.support(
    "runtime", "options drawn at random, many at once: masks, packs, sinks, caps, heads exchanged, every checkpoint"
)


def fuzz(folder: Path, *arguments: str) -> dict[str, int]:
    """How many cases of a run, in which nothing failed, were right, and how many had each feature."""
    report = folder / "report.json"
    status = main([*arguments, "--out", str(report)])
    found: dict[str, Any] = json.loads(report.read_text())
    assert not found["failures"], found["failures"]
    assert status == 0
    ((over, kinds),) = found["kinds"].items()
    return {name.removeprefix(f"{over}: "): count for name, count in found["features"].items()} | kinds


def some(folder: Path, cases: int, *arguments: str) -> tuple[dict[str, int], int]:
    """Return what `fuzz` of so many cases, or of one of their halves by turns, finds, and how many cases it had."""
    halves = by_turns((range(cases // 2), range(cases // 2, cases)))
    count = sum(map(len, halves))
    return fuzz(folder, "--first", str(halves[0].start), "--cases", str(count), *arguments), count


@drawn_at_random
def test_options_drawn_at_random_are_exact_in_one_process(tmp_path: Path) -> None:
    found, cases = some(tmp_path, 120)
    assert found["right"] >= 2 * cases // 3
    words = "9 ranks, with_sinks, softcap, window_size, offsets, layout load_balanced, schedule greedy"
    assert min(found[feature] for feature in (*words.split(", "), "dtype torch.float16")) >= cases // 40, found
    assert sum(count for name, count in found.items() if name.startswith("mask ")) >= cases // 12


@drawn_at_random
def test_one_rank_replays_exactly_under_states_of_pytorch_checkpoints_and_the_compiler(tmp_path: Path) -> None:
    found, cases = some(tmp_path, 40, "--ranks", "1")
    assert found["right"] >= (27 if cases == 40 else 12)
    assert min(found[f"checkpoint {name}"] for name in ("full", "remat", "remat on the host")) >= (
        3 if cases == 40 else 1
    )


@drawn_at_random
@pytest.mark.support("runtime", "packed documents between processes")
@pytest.mark.support("runtime", "attention sinks and their gradient")
@pytest.mark.support("runtime", "sinks with packed documents")
@pytest.mark.parametrize(
    "arguments",
    [
        *(f"--over gloo --ranks {ranks} --first {16 * ranks} --cases 16" for ranks in (2, 3, 4)),
        *(pytest.param(f"--over nccl --ranks {n} --cases 30", marks=pytest.mark.gpu(n)) for n in (2, 4)),
        pytest.param("--device cuda --cases 1000 --seconds 60", marks=pytest.mark.gpu),
    ],
)
def test_options_drawn_at_random_are_exact_together_or_refused(arguments: str, tmp_path: Path) -> None:
    assert fuzz(tmp_path, *arguments.split())["right"] >= 8


def test_several_processes_run_what_one_runs(tmp_path: Path) -> None:
    assert fuzz(tmp_path, "--cases", "8", "--jobs", "2") == fuzz(tmp_path, "--cases", "8")


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
        failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG python")]
        assert failures
        again = _arguments(failures[0])
        assert main(again) == 1
        assert "in units of the tolerance" in capsys.readouterr().out
    assert main(again) == 0, "without the fault it is right"


def test_a_line_says_all_of_a_case() -> None:
    for number in range(50):
        for over in ("together", "gloo"):
            case = draw(0, number, over, ranks=(2, 4, 6))
            assert draw(0, number, over, ranks=(case.ranks,)) == case
            assert f"--ranks {case.ranks}" in case.line


def _arguments(line: str) -> Sequence[str]:
    words = shlex.split(line)
    assert words[:4] == ["WRONG", "python", "-m", "tests.fuzz"]
    return words[4:]


def test_cases_for_a_gpu_are_right_or_refused_on_a_cpu() -> None:
    """The shapes and options of a run on a GPU, with its kernels replaced."""
    cases = [draw(0, number, "together", "cuda") for number in range(400)]
    most = len(by_turns(range(25)))
    wholes = [case.whole for case in cases]
    shapes = {(c.dtype, c.heads, c.kv_heads, c.head_dim, c.head_dim_v, c.softcap) for c in wholes}
    assert len(shapes) == len({dataclasses.replace(shape, deterministic=False) for shape in GPU_CLASSES})
    done = 0
    for case in cases:
        if case.whole.length <= 130 and not case.compiled and done < most:
            options = case.options | {"kernel": "auto"}
            whole = dataclasses.replace(case.whole, device="cpu")
            verdict = attempt(dataclasses.replace(case, whole=whole, options=options))
            assert verdict.kind in ("right", "refused"), verdict
            done += verdict.kind == "right"
    assert done == most
