"""Attention of one query row over a cache that is spread over ranks: each takes its own keys, one exchange merges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from operator import index

import torch

from dfa_megatron import kernels
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import BlockCall, BlockKernel, Need, Partial, accumulator_dtype
from dfa_megatron.kernels.leaf import without_autocast
from dfa_megatron.kernels.merge import weights_of
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import FULL
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.comm.compared import telling
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.execute.sinks import merge_sinks, refuse_sinks
from dfa_megatron.runtime.request import DEFAULTS, Request


def decode_attn_func(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    starts: Sequence[int] | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    config: DistAttentionConfig = DEFAULTS,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return attention of the last token over keys that are spread over the ranks of a group; collective.

    Each rank computes a partial (out, lse) over its own keys. One all-gather of these follows, in float32. The order of
    keys does not matter, so a new key may go to any rank, before this call. There is no backward.

    Args:
        q: (batch, 1, heads, head_dim), the same on every rank.
        k_cache: (batch, slots, kv_heads, head_dim), this rank's keys; any number of slots, also none. May be a view.
        v_cache: (batch, slots, kv_heads, head_dim_v), their values.
        starts: for each row of the batch, the first of this rank's slots that it sees; None for all. Rows differ where
            prompts are padded on the left.
        group: the ranks that share the cache; None is the default group.
        softmax_scale: of the scores; head_dim ** -0.5 if None.
        softcap: scores become softcap * tanh(scores / softcap); 0 for no cap.
        sinks: (heads,), attention sinks, the same on every rank; they count once.
        return_lse: return the lse too.
        config: its kernel and verify are used.

    Returns:
        out (batch, 1, heads, head_dim_v) in q's dtype, the same bits on every rank. With `return_lse` also lse (batch,
        heads, 1), float32 (float64 for float64). A row that sees no key on any rank has out 0 and lse -inf.

    Raises:
        UnsupportedError: shapes, dtypes or devices do not fit together, a gradient is asked for, or no kernel serves.
        DisagreementError: the ranks run different calls.
    """
    with telling(group, config) as over:
        starts = None if starts is None else [*map(index, starts)]
        kernel = _checked(q, k_cache, v_cache, starts, sinks, softcap, config)
        given = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        request = Request(softmax_scale=given, softcap=softcap, causal=True)
        scale = request.softmax_scale
        asked = f"softmax_scale={scale}, softcap={softcap}, sinks={sinks is not None}"
        kind = _kind(tuple(q.shape), tuple(v_cache.shape[2:]), q.dtype, asked)
        starts = (0,) * q.shape[0] if starts is None else starts
    with without_autocast(), over.running(kind, q.device) if over is not None and over.verified else nullcontext():
        out, lse = _partial(kernel, q, (k_cache, v_cache), starts, (scale, softcap))
        if over is not None:
            parts = torch.stack(over.gather(torch.cat((out, lse), -1)))
            out, lse = _merged(parts[..., :-1], parts[..., -1:])
    out = out.unsqueeze(1)
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


@lru_cache(maxsize=256)
def _kind(shape: tuple[int, ...], values: tuple[int, ...], dtype: torch.dtype, asked: str) -> Kind:
    return Kind.of(f"decoding for queries {shape}, values of {values}, {dtype}, {asked}")


def _merged(outs: torch.Tensor, lses: torch.Tensor) -> Partial:
    """Merge partials along the first dimension: outs (..., heads, head_dim_v), lses (..., heads, 1)."""
    weights, lse = weights_of(lses)
    return (outs * weights).sum(0), lse


def _partial(
    kernel: BlockKernel,
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    starts: Sequence[int],
    scores: tuple[float, float],
) -> Partial:
    """Return out (batch, heads, head_dim_v) and lse (batch, heads, 1) over this rank's keys, row by row if needed."""
    k, v = (x[:, starts[0] :] for x in cache)
    splits = kernel.name not in _SPLIT_KEYS and k.shape[1] >= _SPLIT_FROM
    if q.shape[0] > 1 and (splits or len(set(starts)) > 1):
        rows = [slice(at, at + 1) for at in range(q.shape[0])]
        found = [_partial(kernel, q[row], (cache[0][row], cache[1][row]), starts[row], scores) for row in rows]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
    if not splits:
        return _call(kernel, q, k, v, scores)
    each, rest = divmod(k.shape[1], _SPLITS)
    keys, values = (x[0, rest:].unflatten(0, (_SPLITS, each)) for x in (k, v))
    first = _call(kernel, q, k[:, :rest], v[:, :rest], scores)
    parts = (first, _call(kernel, q.expand(_SPLITS, -1, -1, -1), keys, values, scores))
    out, lse = (torch.cat(both).unsqueeze(1) for both in zip(*parts, strict=True))
    return _merged(out, lse)


_SPLIT_KEYS = ("aten", "cpu")
"""Kernels that use the whole device for one query row; others get the parts of a long cache as a batch."""

_SPLITS, _SPLIT_FROM = 32, 4096


def _call(
    kernel: BlockKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: tuple[float, float]
) -> Partial:
    """Return what `_partial` does, by one call of the kernel."""
    (batch, _, heads, _), kv_heads, dtype = q.shape, k.shape[2], accumulator_dtype(q.dtype)
    if not k.shape[1]:
        lse = q.new_full((batch, heads, 1), -math.inf, dtype=dtype)
        return q.new_zeros(batch, heads, v.shape[3], dtype=dtype), lse
    # The query heads of a group are rows of one head: its keys are read once.
    rows = q.unflatten(2, (kv_heads, -1)).squeeze(1).transpose(1, 2)
    out, lse = kernel.forward(BlockCall(rows, k, v, _segments(rows.shape[1], k.shape[1]), *scores))
    return out.transpose(1, 2).flatten(1, 2).to(dtype), lse.flatten(1, 2).unsqueeze(-1).to(dtype)


@lru_cache(maxsize=16)
def _segments(rows: int, keys: int) -> Segments:
    """Return the same object for all layers of a step: it keeps how the kernel is launched."""
    return Segments.one(FULL, rows, keys)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: Sequence[int] | None,
    sinks: torch.Tensor | None,
    softcap: float,
    config: DistAttentionConfig,
) -> BlockKernel:
    """Return the kernel for a call; refuse one that does not fit together."""
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k.shape)} and v_cache {tuple(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)) or q.shape[1] != 1 or k.shape[:3] != v.shape[:3]:
        raise UnsupportedError(shapes, "a call is for one query row over keys and values", _SHAPES)
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UnsupportedError(f"{shapes}, {kinds}", "they must be of one batch, head_dim, dtype and device", _SHAPES)
    if starts is not None and (len(starts) != q.shape[0] or not all(0 <= x <= k.shape[1] for x in starts)):
        why = f"each of {q.shape[0]} rows needs a number from 0 to {k.shape[1]}"
        raise UnsupportedError(f"starts={tuple(starts)}", why, "None, where rows see all slots")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UnsupportedError(
            "a gradient of decoding", "there is no backward", "torch.no_grad(), or dist_flash_attn_func"
        )
    if sinks is not None:
        refuse_sinks(sinks, q)
    return _kernel(config.kernel, q.device, q.dtype, (q.shape[2], k.shape[2], q.shape[3], v.shape[3]), softcap)


_SHAPES = "q (batch, 1, heads, head_dim), k_cache (batch, slots, kv_heads, head_dim) and v_cache like it"


@lru_cache(maxsize=64)
def _kernel(
    name: str, device: torch.device, dtype: torch.dtype, dims: tuple[int, int, int, int], softcap: float
) -> BlockKernel:
    """Return the kernel for (heads, kv_heads, head_dim, head_dim_v)."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    need = Need(device.type, dtype, *dims, frozenset({"full"}), capability=capability, softcap=softcap)
    # FlashAttention-2 splits the keys of few rows; the kernels that are faster on many rows do not.
    fits = name == "auto" and kernels.refusal(kernels.KERNELS["aten"], need) is None
    return kernels.select("aten" if fits else name, need)
