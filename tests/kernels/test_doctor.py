"""`dfa-megatron doctor`: what it prints, when it fails, and how it tries kernels against dense float64."""

from __future__ import annotations

import json
import math
import os
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import dist_flash_attn_func, kernels
from dfa_megatron.cli import doctor
from dfa_megatron.cli.main import main
from dfa_megatron.doctor import distributed_call
from dfa_megatron.doctor import kernel_trial as trial
from dfa_megatron.doctor.distributed_call import StartedRanks
from dfa_megatron.doctor.kernel_trial import Trial
from dfa_megatron.doctor.machine import devices, p2p_access
from dfa_megatron.doctor.world import World
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from tests.support import plants
from tests.support.workers import over_ranks

TINY = [
    "doctor", "--device", "cpu", "--seq-length", "32", "--heads", "4", "--head-dim", "16", "--repetitions", "1",
    "--no-call",
]  # fmt: skip


SMALL = Trial(
    q_len=37, kv_len=29, band=Band(9, 4), heads=4, kv_heads=2, head_dim=24, head_dim_v=24,
    dtype=torch.float32, device="cpu",
)  # fmt: skip


class Off(ReferenceKernel):
    """The reference with one result changed."""

    name = "off"

    def __init__(self, which: str, change: object) -> None:
        self.which, self.change = which, change

    def _changed(self, names: tuple[str, ...], results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(self.change(x) if name == self.which else x for name, x in zip(names, results, strict=True))

    def forward(self, *args: object, **options: object) -> tuple[torch.Tensor, ...]:
        return self._changed(("out", "lse"), super().forward(*args, **options))

    def backward(self, *args: object, **options: object) -> tuple[torch.Tensor, ...]:
        return self._changed(("dq", "dk", "dv"), super().backward(*args, **options))


def test_the_doctor_names_every_kernel_and_what_auto_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--kv-heads", "2"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ") and line.split()}
    assert f"torch {torch.__version__.split('+')[0]}" in out
    assert set(kernels.KERNELS) <= set(lines)
    assert "refused: it runs on CUDA, not on cpu" in lines["cudnn"]
    assert "kernels: float32 on cpu, 4 heads on 2 of 16; rates: causal, 32 tokens" in out
    assert "kernel='auto' takes cpu" in out
    for name in ("cpu", "reference"):
        errors = [float(word) for word in lines[name].split()[1:6]]
        assert 0 < max(errors) < 4e-6


def test_json_holds_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trial, "KERNELS", {"off": Off("out", lambda x: x * 1.1), "cpu": kernels.get("cpu")})
    monkeypatch.setattr(trial, "errors", lambda kernel, shape: {"out": math.inf if kernel.name == "off" else 0.0})
    assert main(TINY) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["WRONG: off", "not ready: kernel off is wrong"]
    assert main([*TINY, "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["auto"] == "cpu"
    assert report["ready"] is False
    assert report["shape"]["q_len"] == 32
    assert report["versions"]["torch"] == torch.__version__ or report["versions"]["torch"] in torch.__version__
    off, cpu = report["kernels"]
    assert off["errors"]["full"]["out"] is None
    assert off["wrong"]
    assert cpu["wrong"] == []
    assert cpu["tflops"]["backward"] > 0


def test_one_call_between_ranks_is_compared_and_timed_with_its_links(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY[:-1], "--kernel", "cpu"]) == 0
    said, err = capfd.readouterr()
    assert said.splitlines()[-1] == "ready: kernel cpu over gloo, on CPU ranks, for tests and small models"
    assert "dfa: " not in err
    assert "one distributed call over 2 ranks: schedule balanced, kernel cpu" in said
    errors = said.split("errors against float64 of causal, window, softcap, pack: ")[1].splitlines()[0]
    assert 0 < max(float(word.split()[1]) for word in errors.split(", ")) < 1e-5
    assert "link p2p: " in said


@pytest.mark.parametrize(
    ("auto", "call", "ready", "said"),
    [
        ("aten", {}, True, "kernel aten, on one GPU, no call between ranks was tried, not flash4: it is not installed"),
        ("aten", {"ranks": 1, "kernel": "aten", "transport": "none"}, True, "on one GPU, no call between ranks"),
        ("aten", {"ranks": 8, "kernel": "aten", "transport": "copy_engine"}, True, "aten over copy_engine, on 8 GPUs"),
        (None, {}, False, "no kernel serves torch.bfloat16 with head_dim 64"),
        ("aten", {"ranks": 2, "failed": "status 1"}, False, "the distributed call failed"),
        ("aten", {"ranks": 2, "wrong": ["window out"]}, False, "the distributed call is wrong"),
    ],
)
def test_the_verdict_says_for_what_a_machine_is_ready_or_what_is_missing(
    auto: str | None, call: dict[str, Any], ready: bool, said: str
) -> None:
    shape = Trial.square(32, 4, 4, 64, torch.bfloat16, "cuda")
    verdicts = [trial.Verdict("flash4", refused="it is not installed"), trial.Verdict("aten")]
    found, line = doctor._verdict(shape, verdicts, auto, call)
    assert found is ready
    assert line.startswith("ready: " if ready else "not ready: ")
    assert said in line


@over_ranks(3)
def test_calls_whose_results_are_off_are_named_on_every_rank_and_refused_ones_told(rank: int, ranks: int) -> None:
    """Of a function that is off where no kernel caps scores, and of a kernel that ignores windows."""

    def off(*tensors: torch.Tensor, **options: Any) -> Any:
        found = dist_flash_attn_func(*tensors, **options)
        return (found[0] * 1.01, found[1]) if options.get("return_lse") else found

    world = World(rank, ranks, torch.device("cpu"), dist.group.WORLD)  # type: ignore[arg-type]
    flags = Trial.square(33, 4, 4, 16, torch.float32, "cpu")
    with (
        mock.patch.object(distributed_call, "dist_flash_attn_func", off),
        mock.patch.object(ReferenceKernel, "caps_scores", False),
    ):
        of_off = distributed_call.compared(flags, world)
    plants.a_kernel_ignores_the_window()
    windowless = distributed_call.compared(flags, world)
    assert {case: names for case, names in of_off["wrong"].items() if names} == {
        case: ["out", "dq", "dk", "dv"] for case in ("causal", "window")
    }
    assert list(of_off["refused"]) == ["softcap"]
    assert {case for case, names in windowless["wrong"].items() if names} == {"window"}
    assert windowless["refused"] == {}


def tell(kernel: kernels.BlockKernel, shape: Trial) -> None:
    """In place of `errors`: leave a file that says what was to be compiled."""
    Path(os.environ["TOLD"], f"{kernel.name} {shape.q_len} {shape.kv_len} {shape.band.right}").touch()


def test_what_will_be_checked_is_compiled_ahead_in_processes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "COMPILED", ("cpu",))
    monkeypatch.setattr(kernels.get("cpu").__class__, "refusal", lambda *_: None)
    monkeypatch.setattr(Trial, "need", lambda _: None)
    monkeypatch.setattr(trial, "errors", tell)
    monkeypatch.setenv("TOLD", str(tmp_path))
    shape = Trial.square(64, 4, 2, 16, torch.float32, "cuda")
    trial.compile_ahead(replace(shape, device="cpu"), [], ["causal", "band"])
    trial.compile_ahead(shape, [], ["causal"])  # the check compiles it itself
    assert capsys.readouterr().err == ""
    trial.compile_ahead(shape, [], ["causal", "band"])
    assert capsys.readouterr().err == "compiling cpu, once for this machine\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cpu 257 193 20", "cpu 257 257 0"]


def test_each_short_call_has_ranks_of_its_own_on_gpus_which_wait_until_they_may_time() -> None:
    """Here they are CPU ranks; one that is killed ends the others of its caller."""
    start = subprocess.Popen

    def on_cpu(command: list[str], **options: Any) -> Any:
        return start([word.replace('"cuda"', '"cpu"') for word in command], **options)

    shape = Trial.square(64, 4, 2, 16, torch.float32, "cuda")
    with mock.patch.object(subprocess, "Popen", on_cpu):
        calls, broken = (StartedRanks(shape, 2, cases) for cases in (("causal", "pack"), ("causal",)))
    broken.running[-1].kill()
    assert broken.result() == {"ranks": 2, "failed": "the ranks ended with status -9"}
    calls.wait()
    assert [file.exists() for file in calls.files] == [True, True]
    found = calls.result()
    assert list(found["errors"]) == ["causal", "pack"]
    assert (found["wrong"], found["refused"], found["transport"]) == ([], {}, "gloo")
    assert found["seconds"] > 0


def test_gpus_and_their_links_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = types.SimpleNamespace(name="NVIDIA X", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: i + j != 3)
    text = doctor._machine({"versions": {"torch": "2"}, "devices": devices(), "p2p_access": p2p_access()})
    assert "cuda:1  NVIDIA X, compute capability 9.0, 140.0 GiB, 132 multiprocessors" in text
    assert text.splitlines()[-3:] == ["  cuda:0  + + +", "  cuda:1  + + -", "  cuda:2  + - +"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "cuddn"], "perhaps 'cudnn'"),
        (["--heads", "6", "--kv-heads", "4"], "heads must be a multiple of kv_heads"),
        (["--seq-length", "-3"], "must be positive"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("which", trial.RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_result_is_found_by_its_name(which: str, dtype: torch.dtype) -> None:
    block = replace(SMALL, dtype=dtype)
    # The backward reads out, through delta, and lse.
    also = {"out": {"dq", "dk"}, "lse": {"dq", "dk", "dv"}}.get(which, set())
    found = trial.wrong(trial.errors(Off(which, lambda x: x * 1.03), block), dtype)
    assert which in found
    assert set(found) <= {which} | also


def test_nan_and_misplaced_infinities_are_infinitely_wrong() -> None:
    def spoil(value: float) -> object:
        def change(x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x.view(-1)[20] = value
            return x

        return change

    assert trial.errors(Off("dq", spoil(math.nan)), SMALL)["dq"] == math.inf
    assert trial.errors(Off("lse", spoil(-math.inf)), SMALL)["lse"] == math.inf
    assert trial.errors(Off("dv", lambda x: x[:, 1:]), SMALL)["dv"] == math.inf


def test_operations_are_those_of_the_visible_pairs() -> None:
    one = replace(SMALL, q_len=4, kv_len=4, heads=1, kv_heads=1, head_dim=8, head_dim_v=16, band=CAUSAL)
    assert one.operations("forward") == 10 * 2 * (8 + 16)
    assert one.operations("backward") == 2.5 * 10 * 2 * (8 + 16)
    assert replace(one, band=FULL, batch=3).operations("forward") == 3 * 16 * 2 * (8 + 16)
    assert replace(one, band=Band(0, 0)).operations("forward") == 4 * 2 * (8 + 16)
    assert replace(one, q_len=9, kv_len=1, band=Band(-1, 0)).operations("forward") == 1 * 2 * (8 + 16)


def test_verdicts_tell_usable_refused_wrong_and_failing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    suspects = {
        "right": kernels.get("cpu"), "off": Off("dk", lambda x: x * 1.1), "broken": Off("dv", fail),
        "elsewhere": kernels.get("cudnn"),
    }  # fmt: skip
    monkeypatch.setattr(trial, "KERNELS", suspects)
    right, off, broken, elsewhere = trial.examine(SMALL, repetitions=1)
    assert right.wrong == []
    assert set(right.errors) == {"causal", "full", "band"}
    assert set(right.tflops) == {"forward", "backward"}
    assert off.wrong == ["causal dk", "full dk", "band dk"]
    assert off.tflops == {}
    assert broken.wrong == [f"{form}: RuntimeError: no such instruction" for form in ("causal", "full", "band")]
    assert elsewhere.refused == "it runs on CUDA, not on cpu"
    assert trial.automatic(SMALL) == "cpu"


def test_a_kernel_that_fails_on_the_timed_shape_alone_is_wrong_and_a_small_memory_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error, wrong, untimed in (
        (RuntimeError("too long"), ["timed shape: RuntimeError: too long"], None),
        (torch.OutOfMemoryError("no"), [], "the device's memory is too small for the shape"),
    ):

        def fail(*args: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(trial, "seconds", fail)
        (verdict,) = trial.examine(SMALL, ["cpu"])
        assert (verdict.wrong, verdict.untimed) == (wrong, untimed)


def test_a_kernel_without_bands_is_checked_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoBands(ReferenceKernel):
        def refusal(self, need: kernels.Need) -> str | None:
            return "it has no window" if "band" in need.forms else super().refusal(need)

    monkeypatch.setattr(trial, "KERNELS", {"plain": NoBands()})
    (verdict,) = trial.examine(replace(SMALL, band=FULL), repetitions=1)
    assert set(verdict.errors) == {"causal", "full"}
    assert verdict.without == "band: it has no window"
    assert verdict.wrong == []
