"""The forwards of a generation: the prompt is a training forward, each later token is one query row on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface.current_forward import Forward, LayerContext
from dfa_megatron.huggingface.generation.holdings import Sight
from dfa_megatron.huggingface.generation.sharded_cache import ShardedCache
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.decode import decode_attn_func

_STATES = Kind.of("what all ranks of a generation need of one")
_TOKENS = Kind.of("the tokens of a step of a generation")
_MIX = 0x1E3779B97F4A7C15


def make_cache(context: LayerContext, config: Any) -> ShardedCache:
    """Return an empty cache for a distributed model; the first one of a group is collective."""
    verify = context.options.verify == "on"
    over = channel_of(context.group, verify=verify)
    if over is None:
        return ShardedCache(config, 0, 1, lambda x: [x])
    return ShardedCache(config, over.rank, over.size, partial(over.gather, kind=_STATES if verify else None))


def begin(context: LayerContext, cache: ShardedCache, given: dict[str, Any]) -> tuple[dict[str, Any], Forward]:
    """Return the arguments and the forward of a prompt, or of the token after it.

    Args:
        given: the arguments of the model, the same on every rank: "input_ids" (batch, tokens) and perhaps
            "attention_mask" (batch, all tokens). Without "position_ids" padding counts, as in one process.

    Raises:
        UnsupportedError: the mask hides something else than padding on the left.
        DisagreementError: the ranks have other tokens.
    """
    ids: torch.Tensor = given["input_ids"]
    progress, counts = cache.progress, given.get("position_ids") is None
    if progress.total:
        agree_on_tokens(context, ids)
        cache.step()
        first = torch.tensor([progress.added if counts else at for at in progress.starts], device=ids.device)
        forward = Forward(context, distributed=False, positions=progress.total - 1 - first[:, None], cache=cache)
    else:
        rows, length = ids.shape
        added = -length % context.size
        starts = [pad + added for pad in padding_of_rows(given.get("attention_mask"), rows, length)]
        agree_on_tokens(context, ids, f"prompt with padding {starts}")
        cache.prefill(starts, length + added, added)
        mine = slice(progress.rank * progress.local, (progress.rank + 1) * progress.local)
        places = torch.arange(length + added, device=ids.device)[None, mine]
        first = torch.tensor([added if counts else at for at in starts], device=ids.device)[:, None]
        forward = Forward(
            context,
            distributed=True,
            # The padding of a row is a document of its own.
            seen=tuple((0, *([at] if at else []), length + added) for at in starts) if any(starts) else None,
            positions=torch.where(places < first, places, places - first),
            longest=length + added - min(starts),
            cache=cache,
        )
        ids = F.pad(ids, (added, 0))[:, mine]
    told = {"input_ids": ids, "attention_mask": None, "position_ids": forward.positions}
    return given | {name: value for name, value in told.items() if name in given}, forward


def padding_of_rows(mask: torch.Tensor | None, rows: int, length: int) -> list[int]:
    """Return the padding tokens on the left of each row.

    Raises:
        UnsupportedError: the mask hides other tokens.
    """
    if mask is None:
        return [0] * rows
    shown = mask.bool()
    padding = length - shown.sum(-1)
    on_left = torch.arange(length, device=mask.device) >= padding[:, None]
    if shown.shape != (rows, length) or not torch.equal(shown, on_left):
        raise UnsupportedError(
            "an attention_mask that hides other tokens than padding on the left",
            "a row of a generation ends with its last token",
            "tokenizer(..., padding=True, padding_side='left')",
        )
    return [int(x) for x in padding.tolist()]


def attend(
    forward: Forward, near: tuple[tuple[int, int], int | None], qkv: tuple[torch.Tensor, ...], call: dict[str, Any]
) -> torch.Tensor:
    """Compute attention of one query row over the cache of all ranks.

    Args:
        near: a layer's window, and the tokens of its chunks.
        qkv: q (batch, 1, heads, head_dim), and this rank's keys and values (batch, slots, kv_heads, head_dim).
        call: options of `decode_attn_func`.
    """
    cache: ShardedCache = forward.cache
    (left, _), chunk = near
    sight = Sight(chunk, True) if chunk else Sight(left + 1 if left >= 0 else None)
    kept = sight if sight in cache.sights else Sight()
    held = cache.progress.held(kept) if kept in cache.sights else None
    if held != qkv[1].shape[1]:
        raise UnsupportedError(
            f"a layer that attends over {qkv[1].shape[1]} tokens of a cache with {held}",
            "its configuration tells another window, or it changes the keys of its cache",
            "with dfa_megatron.huggingface.local_attention(model)",
        )
    out = decode_attn_func(*qkv, starts=cache.progress.hidden(kept, sight), **call)
    assert isinstance(out, torch.Tensor)
    return out


def agree_on_tokens(context: LayerContext, ids: torch.Tensor, what: str = "step") -> None:
    """Compare tokens with those of the other ranks; collective.

    Raises:
        DisagreementError: they differ, or a rank is at another step.
    """
    over = channel_of(context.group)
    if over is None or context.options.verify == "off":
        return
    odd = torch.arange(1, 2 * ids.numel() + 1, 2, device=ids.device)
    digest = ((ids.flatten() + 1) * odd * _MIX).sum() + Kind.of(what).digest  # int64 that wraps around
    if len({int(x) for x in over.gather(digest, _TOKENS)}) > 1:
        raise DisagreementError(
            f"the ranks of a generation have different tokens at this {what}: they must have the same weights, "
            "prompts, options, and when sampling the same random state (torch.manual_seed)"
        )
