"""Choosing a kernel: the first that does not refuse, with reasons and versions, and no GPU asked at import.

Operators and functions of other packages that changed are refused, and tensors are laid out as they need them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron import kernels, names
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import BlockCall, BlockKernel, Need, Saved
from dfa_megatron.kernels.adapters import aten, cpu, cudnn, flash4, shared
from dfa_megatron.kernels.adapters.cudnn import CudnnKernel
from dfa_megatron.kernels.adapters.shared import Operator, dense, vectorised
from dfa_megatron.kernels.triton import adapter as triton_attention
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from tests.support.arguments import assert_refused

ON_CPU = Need("cpu", torch.float32, 8, 2, 64, 64, frozenset({"full", "causal"}))
ON_HOPPER = dataclasses.replace(ON_CPU, device="cuda", dtype=torch.bfloat16, capability=(9, 0))


@pytest.fixture
def hopper_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch says of itself in a CUDA build, so that the refusals behind it can be read on any machine."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(triton_attention, "triton_refusal", lambda: None)
    monkeypatch.setattr(flash4, "_functions", lambda: "flash-attn-4 is not installed")


@pytest.fixture
def flash4_present(hopper_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 beside it."""
    monkeypatch.setattr(flash4, "_functions", lambda: (print, print))


def test_every_kernel_keeps_the_contract_and_has_its_name_in_the_options() -> None:
    assert all(isinstance(kernel, BlockKernel) for kernel in kernels.KERNELS.values())
    assert ("auto", *kernels.KERNELS) == names.KERNELS
    of_delta = {name for name, kernel in kernels.KERNELS.items() if kernel.backward_needs == "delta"}
    assert of_delta == {"flash4", "triton", "reference"}, "the others need out"


UNEVEN = dataclasses.replace(ON_CPU, head_dim_v=32)


@pytest.mark.parametrize(
    ("need", "name", "level", "said"),
    [
        (ON_CPU, "cpu", logging.INFO, "kernel cpu.*flash4 refused: it runs on CUDA.*cudnn refused: it runs on CUDA"),
        (
            UNEVEN,
            "reference",
            logging.WARNING,
            r"cpu refused: it needs head_dim .64. and head_dim_v .32. to be equal",
        ),
    ],
)
def test_auto_says_once_what_it_takes_and_warns_of_the_reference(
    need: Need, name: str, level: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    names.say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="dfa_megatron.kernels"):
        assert kernels.select("auto", need).name == kernels.select("auto", need).name == name
    (record,) = caplog.records
    assert record.levelno == level
    assert re.search(said, record.message)


def taken(name: str = "auto", **changes: object) -> str:
    """The kernel that serves a need on Hopper, with these changes; `dims` are head_dim and head_dim_v."""
    if dims := changes.pop("dims", None):
        changes |= dict(zip(("head_dim", "head_dim_v"), dims, strict=True))  # type: ignore[call-overload]
    return kernels.select(name, dataclasses.replace(ON_HOPPER, **changes)).name  # type: ignore[arg-type]


@pytest.mark.usefixtures("hopper_build")
def test_auto_prefers_cudnn_and_leaves_it_for_what_it_cannot_do() -> None:
    assert taken() == "cudnn"
    assert taken(forms=frozenset({"full", "band"})) == taken(deterministic=True) == taken(packed=True) == "aten"
    assert {taken(dims=dims) for dims in ((256, 256), (192, 128), (136, 136))} == {"cudnn"}
    assert taken(dims=(100, 100)) == taken(dtype=torch.float32) == "triton"
    assert taken(dtype=torch.float64) == "reference"
    assert taken("cudnn", packed=True) == "cudnn"


@pytest.mark.usefixtures("flash4_present")
def test_flash_attention_4_is_preferred_where_the_chip_is_new_enough() -> None:
    assert taken() == taken(forms=frozenset({"band"})) == taken(dims=(256, 256)) == "flash4"
    assert taken(capability=(8, 0)) == taken(dims=(192, 128)) == "cudnn"
    assert taken(dims=(192, 128), kv_heads=8) == taken(capability=(10, 0), dims=(128, 128)) == "flash4"
    assert taken(capability=(10, 0), dims=(256, 256)) == taken(capability=(10, 0), dims=(192, 192)) == "aten"


@pytest.mark.usefixtures("hopper_build")
def test_cudnn_honours_pytorchs_own_deterministic_switch() -> None:
    torch.set_deterministic_debug_mode("error")
    assert kernels.select("auto", ON_HOPPER).name == "aten"


@pytest.mark.usefixtures("hopper_build")
@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("cudnn", {"device": "cpu"}, "runs on CUDA, not on cpu"),
        ("cudnn", {"dtype": torch.float32}, "not torch.float32"),
        ("cudnn", {"forms": frozenset({"band"})}, "no sliding window"),
        ("cudnn", {"deterministic": True}, "not deterministic"),
        ("cudnn", {"head_dim": 36, "head_dim_v": 36}, "multiples of 8"),
        ("cudnn", {"head_dim": 264, "head_dim_v": 264}, "over 128 on compute capability 9.0"),
        ("cudnn", {"head_dim": 128, "head_dim_v": 136}, "not below head_dim_v"),
        ("cudnn", {"head_dim": 136, "head_dim_v": 136, "capability": (10, 0)}, "over 128 on compute capability 10.0"),
        ("cudnn", {"head_dim": 192, "head_dim_v": 128, "capability": (8, 0)}, "over 128 on compute capability 8.0"),
        ("cudnn", {"capability": (7, 5)}, "8.0 (Ampere) or newer, not 7.5"),
        ("aten", {"head_dim_v": 32}, "to be equal"),
        ("aten", {"head_dim": 264, "head_dim_v": 264}, "over 256"),
        ("aten", {"head_dim": 224, "head_dim_v": 224, "capability": (8, 9)}, "over 192 on compute capability 8.9"),
        ("aten", {"capability": None}, "an unknown one"),
        ("flash4", {}, "flash-attn-4 is not installed"),
        ("flash4", {"device": "cpu"}, "runs on CUDA, not on cpu"),
        ("flash4", {"capability": (8, 9)}, "9.x, 10.x or 11.x (Hopper, Blackwell), not 8.9"),
        ("flash4", {"capability": (12, 0)}, "not 12.0"),
        ("flash4", {"head_dim": 264, "head_dim_v": 264}, "head_dim 264 is over 256 on compute capability 9.0"),
        ("flash4", {"head_dim": 192, "head_dim_v": 192, "capability": (10, 0)}, "192 is over 128 on"),
        ("flash4", {"head_dim": 112, "head_dim_v": 112}, "wrong for 80: 112 is none of them"),
        ("flash4", {"head_dim_v": 128}, "head_dim (64) and head_dim_v (128) to be equal"),
        ("flash4", {"head_dim": 192, "head_dim_v": 128}, "work without grouped heads"),
        ("triton", {"device": "cpu"}, "runs on CUDA, not on cpu"),
        ("triton", {"dtype": torch.float64}, "not torch.float64"),
        ("triton", {"head_dim_v": 257}, "head_dim 64 or head_dim_v 257 is over 256"),
        ("triton", {"capability": (7, 5)}, "8.0 (Ampere) or newer, not 7.5"),
        ("cpu", {}, "runs on CPU, not on cuda"),
        ("cpu", {"device": "cpu", "dtype": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"),
        ("reference", {"dtype": torch.int32}, "not torch.int32"),
        ("reference", {"dtype": torch.float8_e5m2}, "not torch.float8_e5m2"),
    ],
)
def test_a_refusal_says_why(name: str, changes: dict[str, object], reason: str) -> None:
    why = kernels.get(name).refusal(dataclasses.replace(ON_HOPPER, **changes))
    assert why is not None
    assert reason in why


@pytest.mark.usefixtures("hopper_build")
def test_an_old_cudnn_and_an_odd_environment_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert "cuDNN 9.10.2" in str(CudnnKernel().refusal(ON_HOPPER))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert "AVOID_RECOMPILE" in str(CudnnKernel().refusal(ON_HOPPER))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
    assert "finds no cuDNN" in str(CudnnKernel().refusal(ON_HOPPER))


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    for name in ("cudnn", "aten"):
        assert f"PyTorch {torch.__version__} is built without CUDA" == kernels.get(name).refusal(ON_HOPPER)


def test_a_named_kernel_that_refuses_says_which_would_do() -> None:
    with pytest.raises(UnsupportedError, match="it runs on CUDA, not on cpu") as error:
        kernels.select("cudnn", ON_CPU)
    assert error.value.instead == "kernel='cpu' or 'reference'"


def test_an_unknown_kernel_names_the_known_ones() -> None:
    known = "perhaps 'cudnn'; one of auto, flash4, cudnn, aten, cpu, triton, reference"
    assert_refused(known, kernels.select, "cuddn", ON_CPU)
    with pytest.raises(UnsupportedError):
        kernels.get("auto")


def test_a_need_that_no_kernel_serves_lists_every_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        kernels.select("auto", dataclasses.replace(ON_CPU, dtype=torch.int32))
    assert all(f"{name}: " in error.value.why for name in kernels.KERNELS)
    assert_refused("no kernel as it stands", kernels.select, "cpu", dataclasses.replace(ON_CPU, dtype=torch.int32))


def test_importing_the_kernels_asks_nothing_of_a_gpu_and_loads_no_compiler_and_one_variable_turns_it_off() -> None:
    """TRITON_INTERPRET=0 is no interpreter; with 1 tests/kernels/test_kernel_triton_interpreted.py runs."""
    code = (
        "import torch, sys\n"
        "def ask(*a, **k): raise SystemExit('a GPU was asked at import')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask\n"
        "torch.backends.cudnn.version = torch.cuda.get_device_capability = ask\n"
        "before = set(sys.modules)\n"
        "import dfa_megatron.kernels\n"
        "assert not {'triton', 'flash_attn'} & (set(sys.modules) - before)\n"
        "need = dfa_megatron.kernels.Need('cpu', torch.float32, 2, 1, 32, 32, frozenset({'full'}))\n"
        "print(dfa_megatron.kernels.get('triton').refusal(need))\n"
    )
    environment, command = os.environ | {"TRITON_INTERPRET": "0"}, [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "it runs on CUDA, not on cpu"


CAPPED = dataclasses.replace(ON_CPU, softcap=30.0)


@pytest.mark.support("kernels", "softcap", "`cpu`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`aten`", refuses=True)
@pytest.mark.support("kernels", "softcap", "`cudnn`", refuses=True)
def test_kernels_that_cap_nothing_refuse_and_name_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    why, able = "it caps no scores", {"flash4", "triton", "reference"}
    assert_refused(rf"{why}.*'reference'", kernels.select, "cpu", CAPPED)
    assert {name for name in kernels.KERNELS if kernels.refusal(kernels.get(name), CAPPED) != why} == able
    with monkeypatch.context() as patch:
        for name in ("triton", "cudnn", "flash4"):
            patch.setattr(type(kernels.get(name)), "refusal", lambda self, need: None)
        capped = dataclasses.replace(ON_HOPPER, softcap=30.0)
        assert kernels.select("auto", capped).name == next(name for name in kernels.KERNELS if name in able)
    for wrong in (-1.0, math.inf, math.nan):
        assert_refused("positive and finite", kernels.select, "auto", dataclasses.replace(CAPPED, softcap=wrong))


def test_flash4_hands_the_cap_to_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, float]] = []

    def record(**arguments: Any) -> tuple[torch.Tensor, ...]:
        given.append((arguments["softcap"], arguments["softmax_scale"]))
        return arguments["q"], torch.zeros(1, 2, 8), arguments["v"]

    monkeypatch.setattr(flash4, "_functions", lambda: (record, record))
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    saved = Saved(torch.zeros(1, 2, 8), minus_delta=torch.zeros(1, 2, 8))
    for softcap in (0.0, 30.0):
        call = BlockCall.of(q, q, q, CAUSAL, 0.5, softcap=softcap)
        kernels.get("flash4").forward(call)
        kernels.get("flash4").backward(call, q, saved)
        assert given[-2:] == [(softcap, 0.5)] * 2


def taking(needed: str, optional: str) -> Callable[..., None]:
    """A function with these arguments, to be looked at and not called."""
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in needed.split()]
    parameters += [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in optional.split()]

    def function() -> None:
        raise NotImplementedError

    vars(function)["__signature__"] = Signature(parameters)
    return function


SHARED = "softmax_scale causal softcap window_size_left window_size_right cu_seqlens_q cu_seqlens_k max_seqlen_q"
FORWARD = "q k v", f"qv {SHARED} max_seqlen_k return_lse seqused_q out lse"
BACKWARD = "q k v out dout lse", f"{SHARED} max_seqlen_k seqused_q deterministic dq dk dv dlse"
"""What the functions take that the adapter knows: needed and optional arguments."""


def flash4_functions(monkeypatch: pytest.MonkeyPatch, interface: object) -> object:
    """What the adapter makes of an installed package whose interface is this, or raises this at import."""

    def load(name: str) -> object:
        assert name == "flash_attn.cute.interface"
        if isinstance(interface, Exception):
            raise interface
        return interface

    monkeypatch.setattr(flash4, "_version", lambda: "4.9.9")
    monkeypatch.setattr(flash4.importlib, "import_module", load)
    return flash4._functions.__wrapped__()


def test_flash4_takes_functions_with_its_arguments_and_refuses_others_with_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, backward = taking(*FORWARD), taking(*BACKWARD)
    right = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    assert flash4_functions(monkeypatch, right) == (forward, backward)
    renamed = taking(FORWARD[0], FORWARD[1].replace("softmax_scale", "scale"))
    greedier = taking(f"{BACKWARD[0]} sinks", BACKWARD[1])
    for interface, said in (
        (
            SimpleNamespace(_flash_attn_fwd=renamed, _flash_attn_bwd=backward),
            "_flash_attn_fwd of flash-attn-4 4.9.9 has no argument softmax_scale; that of 4.0.0b36 has",
        ),
        (
            SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=greedier),
            "_flash_attn_bwd of flash-attn-4 4.9.9 needs sinks; that of 4.0.0b36 does not",
        ),
        (SimpleNamespace(_flash_attn_fwd=forward), "flash-attn-4 4.9.9 has no _flash_attn_bwd; 4.0.0b36 has"),
        (OSError("no libcuda"), "flash-attn-4 4.9.9 cannot be imported (OSError: no libcuda)"),
    ):
        assert said in str(flash4_functions(monkeypatch, interface))


def test_an_operator_that_changed_is_refused_with_the_version_found() -> None:
    version = torch.__version__
    assert Operator("aten::_no_such_attention", (), results=1).refusal() == (
        f"PyTorch {version} has no operator aten::_no_such_attention"
    )
    assert "has no argument input" in str(Operator("aten::logaddexp", ("input", "other"), results=1).refusal())
    assert "needs other, not known here" in str(Operator("aten::logaddexp", ("self",), results=1).refusal())
    assert "returns too little" in str(Operator("aten::logaddexp", ("self", "other"), results=2).refusal())
    with pytest.raises(RuntimeError, match="no operator"):
        Operator("aten::_no_such_attention", (), results=1)()


def test_the_operators_of_this_pytorch_are_those_the_kernels_know() -> None:
    """Their schemas are in every build, so a renamed argument shows without a GPU."""
    for module in (aten, cpu, cudnn):
        assert module._FORWARD.refusal() is None
        assert module._BACKWARD.refusal() is None
    assert cudnn._lse_dimensions() in (3, 4)


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_determinism_lasts_for_the_call_and_leaves_the_switch_as_it_was(mode: str) -> None:
    torch.set_deterministic_debug_mode(mode)
    before = torch.get_deterministic_debug_mode()
    with shared.deterministic_algorithms(True):
        assert torch.get_deterministic_debug_mode() == 2
    assert torch.get_deterministic_debug_mode() == before
    with shared.deterministic_algorithms(False):
        assert torch.get_deterministic_debug_mode() == before
    with pytest.raises(KeyError), shared.deterministic_algorithms(True):
        raise KeyError
    assert torch.get_deterministic_debug_mode() == before


def test_cudnn_never_runs_a_band_as_something_else() -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match="no window"):
        CudnnKernel().forward(BlockCall.of(x, x, x, Band(2, 0), 1.0))
    with pytest.raises(UnsupportedError, match="no window"):
        CudnnKernel().forward(BlockCall.of(x[:, :2], x, x, CAUSAL, 1.0))
    saved = Saved(lse=torch.zeros(1, 2, 4), out=x)
    with pytest.raises(UnsupportedError, match="not deterministic"):
        CudnnKernel().backward(BlockCall.of(x, x, x, FULL, 1.0, deterministic=True), x, saved)


def test_dense_gives_fresh_strides_and_copies_only_what_needs_it() -> None:
    x = torch.randn(1, 6, 4, 8)
    sliced = torch.randn(1, 9, 4, 8)[:, 2:8]
    assert sliced.stride() != x.stride()
    assert dense(sliced).stride() == x.stride()
    assert dense(sliced).data_ptr() == sliced.data_ptr()
    turned = x.transpose(1, 2)
    assert dense(turned).stride() == torch.empty(turned.shape).stride()
    assert torch.equal(dense(turned), turned)
    off = torch.randn(1 * 6 * 4 * 8 + 1)[1:].view(1, 6, 4, 8)
    assert dense(off).data_ptr() % 16 == 0
    assert torch.equal(dense(off), off)


def test_vectorised_keeps_what_sixteen_byte_loads_can_read() -> None:
    fused = torch.randn(2, 6, 4, 24)[..., 8:16]
    assert vectorised(fused) is fused
    for odd in (torch.randn(2, 6, 4, 25)[..., 8:16], torch.randn(2, 6, 8, 4).transpose(2, 3)):
        assert vectorised(odd).is_contiguous()
        assert torch.equal(vectorised(odd), odd)
