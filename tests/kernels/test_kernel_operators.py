"""Operators and functions of other packages: changed ones are refused, and tensors are laid out as they need them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.adapters import aten, cpu, cudnn, flash4, shared
from dfa_megatron.kernels.adapters.cudnn import CudnnKernel
from dfa_megatron.kernels.adapters.shared import Operator, dense, vectorised
from dfa_megatron.kernels.api import BlockCall, Saved
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band


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
