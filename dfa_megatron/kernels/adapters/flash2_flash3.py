"""The flash2 and flash3 kernels: FlashAttention-2 and -3 from packages of their own, for any band."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from dfa_megatron.kernels.adapters.shared import (
    Operator,
    Package,
    build_refusal,
    capability_text,
    dense,
    equal_dims_refusal,
    gpu_refusal,
    vectorised,
)
from dfa_megatron.kernels.api import BlockCall, BlockKernel, Gradients, Need, Partial, Saved
from dfa_megatron.kernels.segments import cut_tall, uncut

FLASH2 = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.0 to 2.8.3")
"""Up to 2.6 its functions are no operators and take the window as a pair; no such version is built for PyTorch 2.6."""
FLASH3 = Package("flash_attn_3", "flash_attn_3._C", "3.0.0b1 of May 2025 (flash-attention 2.8.0) to 3.0.0")
"""Its compiled operators kept one schema over these versions, while the Python functions around them changed twice."""

_COMMON = ("q", "k", "v", "softmax_scale", "window_size_left", "window_size_right")
_BACKWARD = (*_COMMON, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


class FlashPackageKernel(BlockKernel):
    """bfloat16 and float16 on CUDA; grouped heads natively; deterministic on request.

    causal: the operators' name of their causal flag. fixed, forward_only: arguments with one value in every call.
    """

    backward_needs = "out"
    causal: ClassVar[str]
    fixed: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    forward_only: ClassVar[Mapping[str, Any]]

    def __init__(self, package: Package, forward: str, backward: str) -> None:
        shared = self.causal, *self.fixed
        self.operators = (
            Operator(forward, (*_COMMON, *shared, *self.forward_only), results=2, package=package),
            Operator(backward, (*_BACKWARD, *shared), results=1, package=package),
        )

    def refusal(self, need: Need) -> str | None:
        return equal_dims_refusal(need) or build_refusal() or self.operators[0].refusal() or self.operators[1].refusal()

    def launch(self, call: BlockCall) -> Partial:
        results = self.operators[0](**self._arguments(call), **self.forward_only)
        return results[0], results[1]

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        assert saved.out is not None, "the kernel reads out"
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k, call.v))
        self.operators[1](
            **self._arguments(call),
            dout=dense(dout),
            out=dense(saved.out),
            softmax_lse=dense(saved.lse),  # read by its address, strides unseen
            dq=dq,  # versions return them in different places; all of them write in place
            dk=dk,
            dv=dv,
            deterministic=call.deterministic,
        )
        return dq, dk, dv

    def _arguments(self, call: BlockCall) -> dict[str, Any]:
        """Return the arguments that forward and backward share; -1 is no bound."""
        band = call.segments.band
        return {
            "q": vectorised(call.q),
            "k": vectorised(call.k),
            "v": vectorised(call.v),
            "softmax_scale": call.softmax_scale,
            self.causal: band.left < 0 and band.right == 0,
            "window_size_left": band.left,
            "window_size_right": band.right,
            **self.fixed,
        }


class Flash2Kernel(FlashPackageKernel):
    """From Ampere on; the algorithm of the aten kernel in the build that the user chose.

    It takes head_dim over 192 also on compute capability 8.6 and 8.9, and determinism as an argument. Its bounds are
    read as aten's, so calls are cut as for aten.
    """

    name = "flash2"
    cut = staticmethod(cut_tall)
    causal = "causal"
    fixed = MappingProxyType({"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None})
    forward_only = MappingProxyType({"return_softmax": False})

    def __init__(self) -> None:
        super().__init__(FLASH2, "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_backward")


class Flash3Kernel(FlashPackageKernel):
    """On Hopper; deterministic on request up to head_dim 192.

    Unlike FlashAttention-2 it drops a bound only where it cannot bind (flash_api.cpp), so no call is cut. A feature
    that the build left out is refused by its name in the build.
    """

    name = "flash3"
    cut = staticmethod(uncut)
    causal = "is_causal"
    forward_only = MappingProxyType({"num_splits": 1})  # no partial results to combine, one order of sums

    def __init__(self) -> None:
        super().__init__(FLASH3, "flash_attn_3::fwd", "flash_attn_3::bwd")

    def refusal(self, need: Need) -> str | None:
        if why := gpu_refusal(need):
            return why
        if need.capability is None or need.capability[0] != 9:
            return f"it needs compute capability 9.0 (Hopper), not {capability_text(need)}"
        if need.deterministic and 192 < need.head_dim <= 256:
            return f"its backward is not deterministic for head_dim {need.head_dim}, over 192"
        return super().refusal(need) or _left_out(need)


def _left_out(need: Need) -> str | None:
    """Return the flags of the build that left out a feature of the need, or None."""
    wanted = ["BACKWARD"] + ["LOCAL"] * ("band" in need.forms) + ["FP16"] * (need.dtype == torch.float16)
    absent = [flag for flag in wanted if _build_flags().get(f"FLASHATTENTION_DISABLE_{flag}")]
    sizes = [f"HDIM{limit}" for limit in (64, 96, 128, 192, 256) if need.head_dim <= limit]
    if all(_build_flags().get(f"FLASHATTENTION_DISABLE_{size}") for size in sizes):  # a larger size serves a smaller
        absent += sizes
    named = ", ".join(f"FLASHATTENTION_DISABLE_{flag}" for flag in absent)
    return f"{FLASH3.name} {FLASH3.version} was built with {named}" if absent else None


@functools.cache
def _build_flags() -> Mapping[str, bool]:
    """Return the flags in the installed copy's `flash_attn_config`, or nothing where it has none."""
    for name in ("flash_attn_3.flash_attn_config", "flash_attn_config"):
        try:
            flags: Mapping[str, bool] = importlib.import_module(name).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            continue
        return flags
    return {}
