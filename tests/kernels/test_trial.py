"""Trying a kernel: its errors are those against dense float64, a wrong one is found, and operations are counted."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor import kernel_trial as trial
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band

SMALL = trial.Trial(
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


@pytest.mark.parametrize("which", trial.RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_result_is_found_by_its_name(which: str, dtype: torch.dtype) -> None:
    block = dataclasses.replace(SMALL, dtype=dtype)
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
    one = dataclasses.replace(SMALL, q_len=4, kv_len=4, heads=1, kv_heads=1, head_dim=8, head_dim_v=16, band=CAUSAL)
    assert one.operations("forward") == 10 * 2 * (8 + 16)
    assert one.operations("backward") == 2.5 * 10 * 2 * (8 + 16)
    assert dataclasses.replace(one, band=FULL, batch=3).operations("forward") == 3 * 16 * 2 * (8 + 16)
    assert dataclasses.replace(one, band=Band(0, 0)).operations("forward") == 4 * 2 * (8 + 16)
    assert dataclasses.replace(one, q_len=9, kv_len=1, band=Band(-1, 0)).operations("forward") == 1 * 2 * (8 + 16)


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
    (verdict,) = trial.examine(dataclasses.replace(SMALL, band=FULL), repetitions=1)
    assert set(verdict.errors) == {"causal", "full"}
    assert verdict.without == "band: it has no window"
    assert verdict.wrong == []
