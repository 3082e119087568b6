"""The reference kernel: attention in plain tensor operations, the ground truth for every other kernel."""

from __future__ import annotations

import logging
import math

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved, accumulator_dtype
from dfa_megatron.kernels.segments import visible
from dfa_megatron.names import say_once

logger = logging.getLogger(__name__)


class ReferenceKernel(BlockKernel):
    """Any band, any floating dtype, any device; float64 computes in float64, the rest in float32, rounded at the end.

    Needs memory for the whole score matrix (batch, heads, q_len, kv_len). Source: Dao et al. 2022, appendix B.4.
    """

    name = "reference"
    backward_needs = "delta"
    caps_scores = True

    def refusal(self, need: Need) -> str | None:
        """Refuse dtypes without a meaning here."""
        if not need.dtype.is_floating_point or need.dtype.itemsize < 2:
            return f"it computes float64, float32, bfloat16 and float16, not {need.dtype}"
        return None

    def replays(self, *, deterministic: bool) -> bool:
        return True

    def launch(self, call: BlockCall) -> Partial:
        if call.q.is_cuda and min(call.segments.q_len, call.segments.kv_len) > 1:
            say_once(logger.warning, "the reference kernel runs on CUDA: it keeps all scores in memory, and is slow")
        scores = _seen(_scores(call), call)
        lse = torch.logsumexp(scores, dim=-1)
        p = _probabilities(scores, lse)
        out = torch.einsum("bkgij,bjkd->bikgd", p, call.v.to(p.dtype))
        return out.flatten(2, 3).to(call.q.dtype), lse.flatten(1, 2)

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """See `BlockKernel.launch_backward`. Every sum is one matrix product, so it is deterministic."""
        assert saved.minus_delta is not None, "the reference kernel reads delta"
        q, k, v = call.q, call.k, call.v
        kv_heads = k.shape[2]
        scores = _scores(call)
        slope = 1.0 - (scores / call.softcap) ** 2 if call.softcap else None  # of the cap
        scores = _seen(scores, call)
        lse, minus_delta = (_by_kv_head(x, kv_heads, 1) for x in (saved.lse, saved.minus_delta))
        p = _probabilities(scores, lse)
        q5 = _by_kv_head(q.to(p.dtype), kv_heads, dim=2)
        dout5 = _by_kv_head(dout.to(p.dtype), kv_heads, dim=2)
        dv = torch.einsum("bkgij,bikgd->bjkd", p, dout5)
        dp = torch.einsum("bikgd,bjkd->bkgij", dout5, v.to(p.dtype))
        ds = p * (dp + minus_delta.unsqueeze(-1)) * call.softmax_scale
        if slope is not None:
            ds *= slope
        dq = torch.einsum("bkgij,bjkd->bikgd", ds, k.to(p.dtype))
        dk = torch.einsum("bkgij,bikgd->bjkd", ds, q5)
        return dq.flatten(2, 3).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_kv_head(x: torch.Tensor, kv_heads: int, dim: int) -> torch.Tensor:
    """Split the heads in dim into (kv_heads, group), so that a key and value head is never copied to its group."""
    return torch.unflatten(x, dim, (kv_heads, x.shape[dim] // kv_heads))


def _scores(call: BlockCall) -> torch.Tensor:
    """Return the capped scores (batch, kv_heads, group, q_len, kv_len) in the accumulator dtype."""
    compute = accumulator_dtype(call.q.dtype)
    q5 = _by_kv_head(call.q.to(compute), call.k.shape[2], dim=2)
    scores = torch.einsum("bikgd,bjkd->bkgij", q5, call.k.to(compute)) * call.softmax_scale
    return call.softcap * torch.tanh(scores / call.softcap) if call.softcap else scores


def _seen(scores: torch.Tensor, call: BlockCall) -> torch.Tensor:
    """Set a pair that the band hides to -inf, in place."""
    segments = call.segments
    seen = visible(segments.band, segments.q_len, segments.kv_len, scores.device)
    return scores if seen is None else scores.masked_fill_(~seen, -math.inf)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - lse), 0 in a row that sees nothing (its lse is -inf)."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
