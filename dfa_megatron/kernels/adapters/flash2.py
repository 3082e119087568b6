"""The flash2 kernel: FlashAttention-2 from its own package (flash-attn), for any band."""

from __future__ import annotations

from typing import Any, Literal

import torch

from dfa_megatron.kernels.adapters.gpu import build_refusal, gpu_refusal
from dfa_megatron.kernels.adapters.operators import Operator, Package
from dfa_megatron.kernels.adapters.strides import dense, vectorised
from dfa_megatron.kernels.api import Need, Saved
from dfa_megatron.kernels.bands import InPieces, cut_tall
from dfa_megatron.plan.language.geometry import Band, Tile

PACKAGE = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.0 to 2.8.3")
"""Up to 2.6 its functions are no operators and take the window as a pair; no such version is built for PyTorch 2.6."""

_OPTIONS = (
    "q", "k", "v", "dropout_p", "softmax_scale", "causal",
    "window_size_left", "window_size_right", "softcap", "alibi_slopes",
)  # fmt: skip
_FORWARD = Operator("flash_attn::_flash_attn_forward", (*_OPTIONS, "return_softmax"), results=2, package=PACKAGE)
_BACKWARD = Operator(
    "flash_attn::_flash_attn_backward",
    (*_OPTIONS, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"),
    results=1,
    package=PACKAGE,
)


class Flash2Kernel(InPieces):
    """bfloat16 and float16 on CUDA from Ampere on; grouped heads natively; deterministic on request.

    The same algorithm as the aten kernel, in the build that the user chose: head_dim over 192 also on 8.6 and 8.9, and
    determinism as an argument. Its bounds are those of flash_api.cpp, so calls are shrunk and cut as for aten.
    """

    name = "flash2"
    backward_needs: Literal["delta", "out"] = "out"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`."""
        if why := gpu_refusal(need):
            return why
        if need.head_dim != need.head_dim_v:
            return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
        if need.head_dim > 256:
            return f"head_dim {need.head_dim} is over 256"
        return build_refusal() or _FORWARD.refusal() or _BACKWARD.refusal()

    def pieces(self, tile: Tile | None) -> list[Tile]:
        """See `cut_tall`."""
        return list(cut_tall(tile))

    def piece_forward(
        self, softmax_scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `InPieces`."""
        results = _FORWARD(
            q=vectorised(q), k=vectorised(k), v=vectorised(v), return_softmax=False, **_options(band, softmax_scale)
        )
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
        assert saved.out is not None, "the flash2 kernel reads out"
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        _BACKWARD(
            dout=dense(dout),
            q=vectorised(q),
            k=vectorised(k),
            v=vectorised(v),
            out=dense(saved.out),
            softmax_lse=dense(saved.lse),  # read by its address, strides unseen
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=deterministic,
            **_options(band, softmax_scale),
        )
        return dq, dk, dv


def _options(band: Band, softmax_scale: float) -> dict[str, Any]:
    """What forward and backward share; -1 is no bound."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": softmax_scale,
        "causal": band.left < 0 and band.right == 0,
        "window_size_left": band.left,
        "window_size_right": band.right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
