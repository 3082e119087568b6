"""The flash3 kernel: FlashAttention-3 (flash_attn_3, built from flash-attention's `hopper` folder), for any band."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, Literal

import torch

from dfa_megatron.kernels.adapters.gpu import build_refusal, capability_text, gpu_refusal
from dfa_megatron.kernels.adapters.operators import Operator, Package
from dfa_megatron.kernels.adapters.strides import dense, vectorised
from dfa_megatron.kernels.api import Need, Saved
from dfa_megatron.kernels.bands import InPieces
from dfa_megatron.plan.language.geometry import Band

PACKAGE = Package("flash_attn_3", "flash_attn_3._C", "3.0.0b1 of May 2025 (flash-attention 2.8.0) to 3.0.0")
"""Its compiled operators kept one schema over these versions, while the Python functions around them changed twice."""

_OPTIONS = ("q", "k", "v", "softmax_scale", "is_causal", "window_size_left", "window_size_right")
_FORWARD = Operator("flash_attn_3::fwd", (*_OPTIONS, "num_splits"), results=2, package=PACKAGE)
_BACKWARD = Operator(
    "flash_attn_3::bwd",
    (*_OPTIONS, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
    results=1,
    package=PACKAGE,
)


class Flash3Kernel(InPieces):
    """bfloat16 and float16 on Hopper; grouped heads natively; deterministic on request up to head_dim 192.

    Calls are shrunk to the pairs of the band, so that no row is blind. Unlike FlashAttention-2 it drops a bound only
    where it cannot bind (flash_api.cpp), so they need not be cut. What a build left out is refused by its name there.
    """

    name = "flash3"
    backward_needs: Literal["delta", "out"] = "out"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
        if why := gpu_refusal(need):
            return why
        if need.capability is None or need.capability[0] != 9:
            return f"it needs compute capability 9.0 (Hopper), not {capability_text(need)}"
        if need.head_dim != need.head_dim_v:
            return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
        if need.head_dim > 256:
            return f"head_dim {need.head_dim} is over 256"
        if need.deterministic and need.head_dim > 192:
            return f"its backward is not deterministic for head_dim {need.head_dim}, over 192"
        if why := build_refusal() or _FORWARD.refusal() or _BACKWARD.refusal():
            return why
        return _left_out(need)

    def piece_forward(
        self, softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        results = _FORWARD(
            q=vectorised(q), k=vectorised(k), v=vectorised(v), num_splits=1, **_options(band, softmax_scale)
        )  # one split: no partial results to combine, and the same order of sums every time
        return results[0], results[1]

    def piece_backward(
        self,
        softmax_scale: float,
        deterministic: bool,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        band: Band,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        assert saved.out is not None, "the flash3 kernel reads out"
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _BACKWARD(
            dout=dense(dout),
            q=vectorised(q),
            k=vectorised(k),
            v=vectorised(v),
            out=dense(saved.out),
            softmax_lse=dense(saved.lse),  # read by its address, strides unseen
            dq=dq,  # what it returns in which place differs between versions: written in place in all
            dk=dk,
            dv=dv,
            deterministic=deterministic,
            **_options(band, softmax_scale),
        )
        return dq, dk, dv


def _options(band: Band, softmax_scale: float) -> dict[str, Any]:
    """What forward and backward share; -1 is no bound."""
    return {
        "softmax_scale": softmax_scale,
        "is_causal": band.left < 0 and band.right == 0,
        "window_size_left": band.left,
        "window_size_right": band.right,
    }


def _left_out(need: Need) -> str | None:
    """What the need wants and this build has not, by the flag of its build, or None."""
    wanted = ["BACKWARD"] + ["LOCAL"] * ("band" in need.forms) + ["FP16"] * (need.dtype == torch.float16)
    absent = [flag for flag in wanted if _build_flags().get(f"FLASHATTENTION_DISABLE_{flag}")]
    sizes = [f"HDIM{limit}" for limit in (64, 96, 128, 192, 256) if need.head_dim <= limit]
    if all(_build_flags().get(f"FLASHATTENTION_DISABLE_{size}") for size in sizes):  # a larger size serves a smaller
        absent += sizes
    named = ", ".join(f"FLASHATTENTION_DISABLE_{flag}" for flag in absent)
    return f"{PACKAGE.name} {PACKAGE.version} was built with {named}" if absent else None


@functools.cache
def _build_flags() -> Mapping[str, bool]:
    """How the installed copy was built, as its `flash_attn_config` says; nothing where it does not say."""
    for name in ("flash_attn_3.flash_attn_config", "flash_attn_config"):
        try:
            flags: Mapping[str, bool] = importlib.import_module(name).CONFIG["build_flags"]
        except (ImportError, AttributeError, KeyError):
            continue
        return flags
    return {}
