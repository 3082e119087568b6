"""The attention implementation `dfa` of transformers: what a layer calls, and what stands in for its mask."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checks.check_pair import SIDE, two_ways
from dfa_megatron.huggingface.checks.padding import CAUSAL
from dfa_megatron.huggingface.current_forward import CONTEXT, NAME, LayerContext, TwoSequences, forward_of
from dfa_megatron.huggingface.positions.counting_modules import tempered
from dfa_megatron.huggingface.positions.document_starts import Documents
from dfa_megatron.huggingface.positions.seen import Images, Seen, in_chunks, mask_of
from dfa_megatron.huggingface.windows import BothWays, OtherMask, WindowMask, chunk_of, type_of, window_of
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import cross_documents, documents
from dfa_megatron.runtime.agreement.calls import at_layer


def register() -> None:
    """Make `dfa` known to transformers; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | WindowMask | OtherMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of this rank's queries over the whole sequence, for transformers; autocast is honoured.

    Args:
        module: the attention layer; `distribute_attention` has put a context on it.
        query: (batch, heads, local_seq, head_dim), any strides.
        key, value: (batch, kv_heads, local_seq, head_dim); grouped heads stay as few as they are.
        attention_mask: what `mask` returned.
        scaling: of the scores; head_dim ** -0.5 if None.
        sliding_window: tokens that a token sees, itself among them; None where the mask alone tells.
        softcap: scores become softcap * tanh(scores / softcap); None for no cap.
        s_aux: (heads,), the layer's attention sinks.

    Returns:
        out (batch, local_seq, heads, head_dim), and None for the weights.

    Raises:
        UnsupportedError: this function would not honour the layer's request.
    """
    context: LayerContext | None = getattr(module, CONTEXT, None)
    if context is None:
        raise UnsupportedError(
            "attention implementation 'dfa' on a model that was not prepared",
            "the layer does not know the process group",
            "dfa_megatron.huggingface.distribute_attention(model, group=...)",
        )
    batch, forward = query.shape[0], forward_of(module)
    whole = forward.layout.length if isinstance(forward.layout, Layout) else query.shape[2] * context.size
    seen, mask = forward.seen, attention_mask
    decodes = forward.cache is not None and not forward.distributed
    lengths = (max(whole, seen.longest) if isinstance(seen, Seen) else whole, query.shape[2], key.shape[2])
    asks = (
        mask if isinstance(mask, WindowMask) else None if mask is None else type(mask),
        sliding_window,
        _OF_A_CACHE if decodes else lengths,
        dropout,
        is_causal is not False and (forward.images is not None or getattr(module, "is_causal", True)),
        tuple(name for name, value in (("attn_logit_softcapping", softcap), ("sinks", s_aux)) if value is None),
        tuple(name for name in ("position_bias", "head_mask") if others.get(name) is not None),
    )
    window, chunk = _checked(module, asks)
    call: dict[str, Any] = {
        "group": context.group,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "config": context.options,
    }
    number = int(getattr(module, "layer_idx", None) or 0) + 1
    if decodes:
        from dfa_megatron.huggingface.generation.steps import attend  # which needs transformers

        qkv = tuple(x.transpose(1, 2) for x in _autocast(query, key, value))
        with torch.autocast(query.device.type, enabled=False), at_layer(number):
            return attend(forward, (window, chunk), qkv, call), None
    call["layout"] = forward.layout
    images = (forward.images or {}).get(type_of(module) or "")
    if seen is None and (chunk or images):
        seen = ((0, whole),) * batch
    if isinstance(seen, tuple) and chunk:
        seen = in_chunks(seen, chunk)
    qkv = tuple(x.transpose(1, 2) for x in _autocast(tempered(module, query, forward), key, value))
    # Without autocast: kernels choose their precision themselves.
    with torch.autocast(query.device.type, enabled=False), at_layer(number):
        if hasattr(module, SIDE):
            out: Any = _of_pair(qkv, getattr(module, SIDE), forward.pair, call)
        elif seen is None:
            out = dist_flash_attn_func(*qkv, causal=True, window_size=window, **call)
        elif isinstance(seen, Seen) and images is None:  # the same for all rows
            out = dist_flash_attn_func(*qkv, mask=mask_of(seen, (), window[0], chunk), **call)
        else:
            out = _by_rows(qkv, seen, images, (window, chunk), call)
        return out, None


def _of_pair(qkv: tuple[torch.Tensor, ...], side: str, pair: TwoSequences | None, call: dict[str, Any]) -> Any:
    """Compute attention in an encoder-decoder model; nothing sees the padding of the encoder, but for itself.

    Raises:
        UnsupportedError: the encoder or the decoder was called alone, and what it has may be whole sequences or parts.
    """
    if pair is None:
        raise UnsupportedError(
            f"a layer of the {side} of an encoder-decoder model that is called alone",
            "the model's own call tells the tokens of both sequences",
            "a call of the whole model; whole sequences within local_attention(model)",
        )
    layout, out = pair.layouts[side], list[Any]()
    call = call | {"layout": layout}
    if side == "decoder" or pair.real is None:
        return dist_flash_attn_func(*qkv, causal=side == "decoder", **call)
    for real, *row in zip(pair.real, *qkv, strict=True):
        parts = [real, pair.layouts["encoder"].length - real]
        crossed = side == "cross" and cross_documents([layout.queries or 0, 0], parts)
        mask = crossed or documents([part for part in parts if part], causal=False)
        out.append(dist_flash_attn_func(*(x[None] for x in row), mask=mask, **call)[0])
    return torch.stack(out)


def _by_rows(
    qkv: tuple[torch.Tensor, ...],
    seen: Documents | Seen,
    images: tuple[Images, ...] | None,
    near: tuple[tuple[int, int], int | None],
    call: dict[str, Any],
) -> torch.Tensor:
    """Compute attention row by row: each has documents, or images, at places of its own."""
    out = list[Any]()
    for at, row in enumerate(zip(*qkv, strict=True)):
        inside = seen if isinstance(seen, Seen) else seen[at]
        if isinstance(inside, tuple) and images is None:
            out.append(dist_flash_attn_varlen_func(*row, inside, causal=True, window_size=near[0], **call))
        else:
            mask = mask_of(inside, images[at] if images else (), near[0][0], near[1])
            out.append(dist_flash_attn_func(*(x[None] for x in row), mask=mask, **call)[0])
    return out[0][None] if len(out) == 1 else torch.stack(out)


_OF_A_CACHE = (1 << 60, 1, 1)
"""Lengths of a sequence, of which every window hides something, of queries, and of keys that are another matter."""

_ASKED = "_dfa_asked"  # the attribute of a layer for what it asked last
_HIDES_NOTHING = "_dfa_hides_nothing"  # the attribute of a mask that need not be read


def _checked(module: torch.nn.Module, asks: tuple[Any, ...]) -> tuple[tuple[int, int], int | None]:
    """Return a layer's window and the tokens of its chunks; check a call that asks for other things than its last one.

    Raises:
        UnsupportedError: attention would not be what the layer asks for.
    """
    known: tuple[Any, tuple[int, int], int | None] | None = vars(module).get(_ASKED)
    if known is not None and known[0] == asks:
        return known[1:]
    mask, size, lengths, dropout, causal, kept, more = asks
    _check_layer(module, dropout, causal, kept, more)
    if two_ways(module) and mask in (None, BothWays):
        mask = None
    else:
        _check_mask(mask, lengths)
    chunk = chunk_of(module, mask)
    window = window_of(module, None if chunk else mask, size, lengths[0])
    setattr(module, _ASKED, (asks, window, chunk))
    return window, chunk


def _check_layer(
    module: torch.nn.Module, dropout: float, causal: bool, kept: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Refuse a layer that is not causal, or whose scores the kernels would not make.

    Args:
        kept: what a layer may have as an attribute, but did not hand over.
        more: what no kernel takes.
    """
    layer = type(module).__name__
    if dropout:
        raise UnsupportedError(
            f"attention dropout {dropout}", "the block kernels have no dropout", "config.attention_dropout=0.0"
        )
    if not two_ways(module) and not causal:
        raise UnsupportedError("attention that is not causal", "models are distributed with a causal mask", CAUSAL)
    for name in more:
        why = "the block kernels take no bias" if name == "position_bias" else "the block kernels mask no heads"
        raise UnsupportedError(f"{name} in a layer of type {layer}", why, CAUSAL)
    for name in kept:
        # A layer that has one of these and keeps it applies it in a way that would be lost here.
        if getattr(module, name, None) is not None:
            raise UnsupportedError(
                f"{name} in a layer of type {layer}",
                "the layer does not hand it to its attention implementation",
                "a layer that passes softcap and s_aux, as those of Gemma 2 and GPT-OSS do",
            )


def _check_mask(mask: Any, lengths: tuple[int, int, int]) -> None:
    """Refuse a key cache, and masks that the plan does not hold."""
    _, queries, keys = lengths
    if queries != keys:
        raise UnsupportedError(
            f"attention of {queries} tokens over {keys}",
            "there is no key cache: every rank holds as many queries as keys",
            "with dfa_megatron.huggingface.local_attention(model), on whole sequences",
        )
    if isinstance(mask, type):
        raise UnsupportedError(
            "a mask beyond causal and sliding window",
            "prefixes and blocks are not planned, and verify='off' does not see packed documents; under torch.compile "
            "transformers asks for such a mask whatever the batch",
            f"{CAUSAL}, in a model that is not compiled",
        )


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast attention's inputs as autocast would: rotary embeddings leave q and k in float32, but not v."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in tensors)


def nothing_hidden(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return a mask that hides nothing; given one, transformers does not look for documents in the positions."""
    everything = torch.ones(batch, length, dtype=torch.bool, device=device)
    setattr(everything, _HIDES_NOTHING, True)
    return everything


def mask(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    mask_function: Any = None,
    **others: Any,
) -> WindowMask | OtherMask | None:
    """Return no mask tensor, because the plan holds causality and the window; called once per forward.

    attention_mask: (batch, local_seq) as the user gave it, or `nothing_hidden`.
    mask_function: what it hides; models that make a mask whatever the batch may still mean a causal one.
    local_size: the sliding window of the layers that this mask is for, or their chunk; None for those without.

    Raises:
        UnsupportedError: it hides a token.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if attention_mask is not None and not hasattr(attention_mask, _HIDES_NOTHING) and not bool(attention_mask.all()):
        raise UnsupportedError(
            "an attention_mask with padding",
            "padded tokens would be attended to",
            "padding on the right, which is checked and removed before the layers see it",
        )
    if not allow_is_causal_skip and mask_function is not causal_mask_function:
        return BothWays() if mask_function is bidirectional_mask_function else OtherMask()
    return None if local_size is None else WindowMask(local_size)
