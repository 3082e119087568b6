"""Attention over chosen keys: every query reads its own few of the keys of all ranks.

Between forward and backward a rank keeps its own rows alone. Keys and values are gathered again in the backward, and
gradients go back to the ranks that hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.indexed.whole import MEMORY, Whole, kernels_for, scale_of
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.adapters import cudnn_sparse
from dfa_megatron.kernels.leaf import differentiable_once, outside_graphs, without_autocast
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import components
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.comm.compared import Compared, facts_of_tokens, telling
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.cu_seqlens import CuSeqlens
from dfa_megatron.runtime.execute.moves import Moves
from dfa_megatron.runtime.execute.sinks import merge_sinks, refuse_sinks, sinks_gradient
from dfa_megatron.runtime.request import DEFAULTS, Inputs, refuse_strangers, refuse_tensors

Attended = tuple[torch.Tensor, torch.Tensor]
"""out (rows, heads, head_dim_v) and lse (rows, heads)."""


@outside_graphs
def sparse_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    head_dim_v: int | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens: CuSeqlens = None,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return attention of this rank's queries over the keys at chosen positions of the whole sequence; collective.

    Exact with its gradients. In a checkpointed region (`remat.context_fn`) the recompute takes (out, lse) of the first
    pass and sends nothing.

    Args:
        q: (batch, local_seq, heads, head_dim), float64, float32, bfloat16 or float16.
        k: (batch, local_seq, kv_heads, head_dim); kv_heads divides heads.
        v: (batch, local_seq, kv_heads, head_dim_v). None: the first `head_dim_v` numbers of each key are its value, as
            in latent attention, with one key head of 576 and values of 512.
        positions: int32 or int64 (batch, local_seq, topk), global positions in the row, each at most once in a row, -1
            for none: of `index_topk`, of an earlier layer, or of a sampler. On CPUs they are checked.
        head_dim_v: where v is None.
        group, layout, config: as for `index_topk`.
        softmax_scale: of the scores; head_dim ** -0.5 if None.
        sinks: (heads,), as for `dist_flash_attn_func`: its gradient is that of this rank's rows.
        return_lse: return lse too.
        cu_seqlens: the documents, which the layout "load_balanced" needs. If given, on CPUs a choice of a key that its
            query does not see is refused.

    Returns:
        out (batch, local_seq, heads, head_dim_v) in q's dtype. With `return_lse` also lse (batch, heads, local_seq),
        float32 (float64 for float64), without gradient. A query without keys has out 0.

    Raises:
        UnsupportedError: shapes, dtypes, positions and layout do not fit together.
        DisagreementError: the ranks ask for different things, or run different calls.
    """
    with telling(group, config) as over:
        latent = v is None
        values = k if v is None else v
        refuse_strangers(q, k, values)
        values = values[..., :head_dim_v] if values.dim() else values
        refuse_tensors(Inputs(q, k, values))
        if latent != (head_dim_v is not None):
            raise UnsupportedError(f"head_dim_v={head_dim_v}", "it is for keys that hold values", "v, or head_dim_v")
        if sinks is not None:
            refuse_sinks(sinks, q)
        whole = Whole.of(q, over, layout, cu_seqlens)
        chosen = check_positions(positions, q, whole, cu_seqlens is not None)
        scale = scale_of(softmax_scale, q.shape[3])
        trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        facts = facts_of_tokens(k, 1) | {"heads": str(q.shape[2]), "values": f"{'in keys, ' * latent}{values.shape[3]}"}
        facts |= {"scale": str(scale), "gradient": str(trains), "sinks": str(sinks is not None)}
        exchange = whole.exchange("attention over chosen keys", facts, q.device)
    kv = (k if v is None else torch.cat([k, v], 3)).flatten(0, 1)
    width = values.shape[3]
    first = 0 if latent else q.shape[3]
    call = _SparseCall(exchange, whole.keys(q.device), scale, (first, first + width))
    frame, known = active_frame(), None
    if frame is not None and not frame.recording:
        COUNTERS.reused += 1
        known = frame.take()
    out, lse = _SparseAttention.apply(q.flatten(0, 1), kv, sinks, chosen, call, known)  # type: ignore[no-untyped-call]
    if frame is not None and frame.recording:
        frame.record(out, lse)
    out = out.view(*q.shape[:3], width)
    return (out, lse.view(q.shape[:3]).transpose(1, 2)) if return_lse else out


def check_positions(positions: torch.Tensor, q: torch.Tensor, whole: Whole, documents: bool) -> torch.Tensor:
    """Return the positions (rows, topk) of the batch as one sequence; refuse those that do not fit.

    documents: refuse those that their query does not see; else only what lies outside of the row, or comes twice.
    """
    if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 3:
        what = f"positions {tuple(positions.shape)}, {positions.dtype}"
        raise UnsupportedError(what, "they are numbers of keys", "int32 or int64 (batch, local_seq, topk)")
    if positions.shape[:2] != q.shape[:2] or positions.device != q.device:
        what = f"positions {tuple(positions.shape)} on {positions.device} for q {tuple(q.shape)} on {q.device}"
        raise UnsupportedError(what, "each query has its own", "one batch, local_seq and device for both")
    chosen = whole.joined(positions)
    if positions.is_cpu and positions.numel():
        ordered = positions.sort(-1).values
        if positions.min() < -1 or positions.max() >= whole.length:
            what = f"positions from {int(positions.min())} to {int(positions.max())}"
            raise UnsupportedError(what, f"a row has {whole.length} tokens", "global positions in the row, -1 for none")
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise UnsupportedError("a position that comes twice in a row", "its key would count twice", "each once")
        if documents:
            _check_seen(chosen, whole)
    return chosen


def _check_seen(chosen: torch.Tensor, whole: Whole) -> None:
    """Refuse a choice of a key that lies behind its query, or in another document."""
    own = torch.tensor(whole.layout.positions(whole.rank))[:, None]
    starts = torch.tensor([document.span.lo for document in components(whole.seen)])
    first = starts[torch.searchsorted(starts, own, right=True) - 1]
    wrong = ((chosen > own) | (chosen < first)) & (chosen >= 0)
    if wrong.any():
        row, column = (int(x) for x in wrong.nonzero()[0])
        what = f"token {int(own[row])} with key {int(chosen[row, column])} among its positions"
        raise UnsupportedError(what, "it does not see that key", "keys of its document, none behind it")


@dataclass(frozen=True, slots=True)
class _SparseCall:
    """exchange: over the ranks. keys: the moves of keys. values: where they lie in the last dimension of kv."""

    exchange: Compared
    keys: Moves
    scale: float
    values: tuple[int, int]


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        sinks: torch.Tensor | None,
        chosen: torch.Tensor,
        call: _SparseCall,
        known: Attended | None,
    ) -> Attended:
        """q (rows, heads, head_dim), kv (own tokens, kv_heads, head_dim and head_dim_v), chosen (rows, topk)."""
        if known is not None:
            out, lse = (x.detach() for x in known)
        else:
            with call.exchange.running(0, q.device), without_autocast():
                out, lse = attend(q, call.keys.run(kv, over=call.exchange.over), chosen, call.scale, call.values)
            if sinks is not None:
                rows, total = merge_sinks(out[None], lse.T[None], sinks)
                out, lse = rows[0], total[0].T.contiguous()
            out = out.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, kv, sinks, chosen, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @differentiable_once("attention over chosen keys", 0, 1, 2)
    def backward(ctx: Any, dout: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        q, kv, sinks, chosen, out, lse = ctx.saved_tensors
        call, back = ctx.call, ctx.call.keys.back()
        dout = torch.zeros_like(out) if dout is None else dout
        with call.exchange.running(1, q.device):
            keys = call.keys.run(kv, over=call.exchange.over)
            dq, dkv = gradients(dout, (q, keys, chosen), (out, lse), call.scale, call.values)
            dkv = back.run(dkv.to(kv.dtype), over=call.exchange.over)
        dsinks = None if sinks is None else sinks_gradient(dout[None], out[None], lse.T[None], sinks)
        return dq.to(q.dtype), dkv, dsinks, None, None, None


def attend(q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, scale: float, values: tuple[int, int]) -> Attended:
    """Return (out, lse) in the accumulator's dtype; kv: (tokens, kv_heads, width), of the whole sequence."""
    if (kernels := kernels_for(q)) is not None:
        found: Attended = kernels.attend(q, kv, chosen, scale, values)
        return found
    wide, (first, end) = accumulator_dtype(q.dtype), values
    out, lse = q.new_zeros(*q.shape[:2], end - first, dtype=wide), q.new_empty(q.shape[:2], dtype=wide)
    for rows, heads, at in steps(q, kv, chosen):
        near, scores = _scores(q[rows, heads], kv[:, at], chosen[rows], scale)
        lse[rows, heads] = total = scores.logsumexp(2)
        out[rows, heads] = probabilities(scores, total) @ near[..., first:end]
    return out, lse


def gradients(
    dout: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: Attended,
    scale: float,
    values: tuple[int, int],
) -> Attended:
    """Return (dq, dkv of the whole sequence) in the accumulator's dtype, by cuDNN in q's. inputs: q, kv, positions."""
    (q, kv, chosen), (out, lse), (first, end) = inputs, results, values
    if cudnn_sparse.takes(q, kv, chosen, values):
        return cudnn_sparse.gradients(dout, inputs, results, scale)
    wide, dim = lse.dtype, q.shape[2]
    delta = minus_delta(dout[None], out[None])[0].T
    if (kernels := kernels_for(q, adds=True)) is not None:
        found: Attended = kernels.gradients(dout, inputs, (lse, delta), scale, values)
        return found
    dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    for rows, heads, at in steps(q, kv, chosen):
        near, scores = _scores(q[rows, heads], kv[:, at], chosen[rows], scale)
        p, above = probabilities(scores, lse[rows, heads]), dout[rows, heads].to(wide)
        ds = p * (above @ near[..., first:end].transpose(1, 2) + delta[rows, heads, None]) * scale
        dq[rows, heads] = ds @ near[..., :dim]
        dnear = torch.zeros_like(near)
        dnear[..., :dim] = ds.transpose(1, 2) @ q[rows, heads].to(wide)
        dnear[..., first:end] += p.transpose(1, 2) @ above
        dkv[:, at].index_add_(0, chosen[rows].flatten().clamp(min=0), dnear.flatten(0, 1))
    return dq, dkv


def steps(q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Yield (rows, query heads, their kv head), so that the keys of the rows take no more than `MEMORY`."""
    group = q.shape[1] // kv.shape[1]
    size = max(1, chosen.shape[1]) * max(group, kv.shape[2]) * accumulator_dtype(q.dtype).itemsize
    step = max(1, MEMORY // size)
    for first in range(0, len(q), step):
        for at in range(kv.shape[1]):
            yield slice(first, first + step), slice(at * group, (at + 1) * group), at


def _scores(q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, scale: float) -> Attended:
    """Return the chosen keys (rows, topk, width) and the scores (rows, heads, topk), -inf where there is no key."""
    wide = accumulator_dtype(q.dtype)
    near = kv.index_select(0, chosen.flatten().clamp(min=0)).unflatten(0, chosen.shape).to(wide)
    scores = q.to(wide) @ near[..., : q.shape[2]].transpose(1, 2) * scale
    return near, scores.masked_fill_((chosen < 0)[:, None], -math.inf)


def probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - lse), 0 where a row sees nothing."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
