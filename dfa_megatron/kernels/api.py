"""The contract of a block kernel: attention over one (q rows x kv rows x band), and its gradient given the lse.

Shapes: q, out, dout, dq (batch, q_len, heads, head_dim); k, dk (batch, kv_len, kv_heads, head_dim); v, dv (batch,
kv_len, kv_heads, head_dim_v), and out has v's head_dim; lse, delta (batch, heads, q_len). Tensors may be strided views.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

import torch

from dfa_megatron.plan.language.geometry import Band

if TYPE_CHECKING:
    from dfa_megatron.kernels.segments import Segments

Form = Literal["full", "causal", "band"]
"""full: no pair is masked. causal: right = 0, left unbounded, q_len = kv_len. band: any other window."""


def form_of(band: Band, q_len: int, kv_len: int) -> Form:
    """The simplest form of a call, which is what a kernel is selected by."""
    if band.is_full:
        return "full"
    return "causal" if band.left < 0 and band.right == 0 and q_len == kv_len else "band"


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, delta and of every accumulator: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Need:
    """What one distributed attention asks of its kernel; a kernel is chosen once for all ranks and steps."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    forms: frozenset[Form]
    deterministic: bool = False
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on CPU."""
    softcap: float = 0.0
    """Scores are softcap * tanh(scores / softcap); 0 leaves them as they are."""
    alibi: bool = False
    """-slope * |i - j| is added to the (capped) scores of tokens i and j, which calls are told row by row."""
    packed: bool = False
    """Calls are of several segments, whose lengths are others in every batch."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward of a block knows of its rows' forward: the global lse, and one of delta and out.

    lse, delta (batch, heads, q_len) in the accumulator dtype, delta = rowsum(dout * out); out (batch, q_len, heads,
    head_dim_v) in q's dtype. `delta` is there for kernels that read "delta", `out` for those that read "out".
    """

    lse: torch.Tensor
    delta: torch.Tensor | None = None
    out: torch.Tensor | None = None


@runtime_checkable
class BlockKernel(Protocol):
    """One way to compute a block. Implementations are stateless."""

    name: str
    backward_needs: Literal["delta", "out"]
    """What its backward takes of the forward beside lse; it decides what a helped rank puts on the wire."""

    def refusal(self, need: Need) -> str | None:
        """Why this kernel cannot serve the need (with the versions found), or None if it can."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Band, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised (out, lse) of the block: out in q's dtype, lse (natural logarithm) in the accumulator dtype.

        A row that sees nothing has out 0 and lse -inf.
        """
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        *,
        band: Band,
        softmax_scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This block's share of (dq, dk, dv), given the lse of the whole row (paper, section 3.1; FlashAttention-2)."""
        ...


class Capping:
    """A base of kernels that can cap scores; as they stand they cap none, and `softcap` is 0."""

    softcap: float = 0.0

    def capped(self, softcap: float) -> Self:
        """The same kernel with scores of softcap * tanh(scores / softcap), in forward and backward; softcap over 0."""
        kernel = copy.copy(self)
        kernel.softcap = softcap
        return kernel


@runtime_checkable
class VarlenKernel(BlockKernel, Protocol):
    """A block kernel that computes several segments of a call at once, for a batch of one.

    Rows of no segment get the identity of the merge: out 0 and lse -inf, gradients 0.
    """

    def forward_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, segments: Segments, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of all rows of the call, as `BlockKernel.forward` gives them."""
        ...

    def backward_segments(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        saved: Saved,
        *,
        segments: Segments,
        softmax_scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv) of all rows of the call, as `BlockKernel.backward` gives them."""
        ...
