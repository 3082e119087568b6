"""The reference kernel: attention over a block in plain tensor operations, the ground truth for every other kernel."""

from __future__ import annotations

import functools
import logging
import math
from typing import Literal

import torch

from dfa_megatron.kernels.alibi import Alibi, Biasing
from dfa_megatron.kernels.api import Need, Saved, accumulator_dtype
from dfa_megatron.kernels.bands import visible
from dfa_megatron.plan.language.geometry import Band

logger = logging.getLogger(__name__)


class ReferenceKernel(Biasing):
    """Any band, any floating dtype, any device; float64 computes in float64, the rest in float32, rounded at the end.

    Needs memory for the whole score matrix (batch, heads, q_len, kv_len). Source: Dao et al. 2022, appendix B.4.
    """

    name = "reference"
    backward_needs: Literal["delta", "out"] = "delta"

    def refusal(self, need: Need) -> str | None:
        """Only what has no meaning is refused."""
        if not need.dtype.is_floating_point or need.dtype.itemsize < 2:
            return f"it computes float64, float32, bfloat16 and float16, not {need.dtype}"
        if need.heads % need.kv_heads:
            return f"heads ({need.heads}) must be a multiple of kv_heads ({need.kv_heads})"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, band: Band, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `BlockKernel.forward`."""
        if q.is_cuda and min(q.shape[1], k.shape[1]) > 1:
            _tell_cost()
        scores = _scores(q, k, softmax_scale, self.softcap)
        scores = _seen(scores, q, k, band, self.alibi)
        lse = torch.logsumexp(scores, dim=-1)
        p = _probabilities(scores, lse)
        out = torch.einsum("bkgij,bjkd->bikgd", p, v.to(p.dtype))
        return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)

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
        """See `BlockKernel.backward`; reads `saved.delta`. Every sum is one matrix product, so it is deterministic."""
        assert saved.delta is not None, "the reference kernel reads delta"
        kv_heads = k.shape[2]
        scores = _scores(q, k, softmax_scale, self.softcap)
        slope = 1.0 - (scores / self.softcap) ** 2 if self.softcap else None  # of the cap
        scores = _seen(scores, q, k, band, self.alibi)
        lse, delta = (_by_kv_head(rows, kv_heads, dim=1) for rows in (saved.lse, saved.delta))
        p = _probabilities(scores, lse)
        q5 = _by_kv_head(q.to(p.dtype), kv_heads, dim=2)
        dout5 = _by_kv_head(dout.to(p.dtype), kv_heads, dim=2)
        dv = torch.einsum("bkgij,bikgd->bjkd", p, dout5)
        dp = torch.einsum("bikgd,bjkd->bkgij", dout5, v.to(p.dtype))
        ds = p * (dp - delta.unsqueeze(-1)) * softmax_scale
        if slope is not None:
            ds *= slope
        dq = torch.einsum("bkgij,bjkd->bikgd", ds, k.to(p.dtype))
        dk = torch.einsum("bkgij,bikgd->bjkd", ds, q5)
        return dq.flatten(2, 3).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_kv_head(x: torch.Tensor, kv_heads: int, dim: int) -> torch.Tensor:
    """Split the heads in dim into (kv_heads, group), so that a key and value head is never copied to its group."""
    return torch.unflatten(x, dim, (kv_heads, x.shape[dim] // kv_heads))


def _scores(q: torch.Tensor, k: torch.Tensor, softmax_scale: float, softcap: float) -> torch.Tensor:
    """(batch, kv_heads, group, q_len, kv_len) in the accumulator dtype, capped."""
    compute = accumulator_dtype(q.dtype)
    q5 = _by_kv_head(q.to(compute), k.shape[2], dim=2)
    scores = torch.einsum("bikgd,bjkd->bkgij", q5, k.to(compute)) * softmax_scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _seen(scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor, band: Band, alibi: Alibi | None) -> torch.Tensor:
    """The scores with their bias, -inf where the band hides a pair; written in place."""
    if alibi is not None:
        distance = (alibi.q_positions[:, None] - alibi.kv_positions[None, :]).abs().to(scores.dtype)
        scores -= _by_kv_head(alibi.slopes.to(scores.dtype), k.shape[2], dim=0)[..., None, None] * distance
    seen = visible(band, q.shape[1], k.shape[1], q.device)
    return scores if seen is None else scores.masked_fill_(~seen, -math.inf)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), 0 in a row that sees nothing (whose lse is -inf)."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))


@functools.cache
def _tell_cost() -> None:
    logger.warning("the reference kernel runs on CUDA: it keeps the whole score matrix in memory and is slow")
