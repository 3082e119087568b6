"""The attention implementation `dfa` of transformers: what a layer calls, and what it gets as its mask.

Models pass windows to their layers in masks, and many layers in a keyword too. As eager attention and SDPA do, the mask
alone is honoured. A `PlannedMask` stands for it: the plan holds causality, windows, chunks, documents and padding.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import torch

from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import refuse_unreached
from dfa_megatron.huggingface.batch import CAUSAL
from dfa_megatron.huggingface.current_forward import NAME, Forward, forward_of, in_layer, innermost, reach
from dfa_megatron.huggingface.embedded_positions import tempered
from dfa_megatron.huggingface.indexers import attend, factors_of
from dfa_megatron.huggingface.seen import Documents, Images, Seen, in_chunks, mask_of


def register() -> None:
    """Make `dfa` known to transformers; may be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass(frozen=True, slots=True)
class PlannedMask:
    """Replace the mask of a layer. Models slice it, but do not copy it: no tensor.

    size: tokens that a token sees, including itself; of layers with chunks, the tokens of a chunk. None for all.
    planned: whether it hides no more than that; a layer that is given another may never run.
    """

    size: int | None = None
    planned: bool = True
    dtype: ClassVar = torch.bool

    def __getitem__(self, index: tuple[Any, ...]) -> Self:
        """Return itself for a slice of all queries."""
        if any(part not in (slice(None), slice(0, None)) for part in index[2:3]):
            raise UnsupportedError(
                "logits_to_keep in a model whose layers share keys",
                "the layers that share them would have fewer queries than keys",
                "logits_to_keep=0",
            )
        return self

    def _itself(self, *_: Any) -> Self:
        return self

    __invert__ = to = _itself

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """Refuse a layer that computes with its mask."""
        refuse_unreached(getattr(innermost(), "owner", None), [NAME])


_HIDES_NOTHING = "_dfa_hides_nothing"  # the attribute of a mask that need not be read


def nothing_hidden(tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask that hides nothing; given one, transformers does not look for documents in the positions."""
    everything = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    setattr(everything, _HIDES_NOTHING, True)
    return everything


def mask(**given: Any) -> Any:
    """Return what layers get as their mask: once per forward, and in a local one by the former implementation.

    given: by transformers. attention_mask (batch, local_seq): of the user, or `nothing_hidden`. mask_function: what it
    hides; models that make a mask whatever the batch may still mean a causal one. local_size: the window of the layers
    that it is for, or their chunk; None for those without.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    call, padding = innermost(), given.get("attention_mask")
    if call is not None and not call.forward.distributed:
        former = call.forward.context.before
        return ALL_MASK_ATTENTION_FUNCTIONS[former](**given) if former in ALL_MASK_ATTENTION_FUNCTIONS else None
    if padding is not None and not hasattr(padding, _HIDES_NOTHING) and not bool(padding.all()):
        raise UnsupportedError(
            "an attention_mask with padding",
            "padded tokens would be attended to",
            "padding on the right, which is checked and removed before the layers see it",
        )
    planned = given.get("allow_is_causal_skip", True) or given.get("mask_function") is causal_mask_function
    return PlannedMask(given.get("local_size"), planned=planned)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PlannedMask | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention for transformers: over the ranks, or in a local forward by the model's former implementation.

    Args:
        module: the attention layer; `distribute_attention` has put a context on it.
        query: (batch, heads, local_seq, head_dim), any strides.
        key, value: (batch, kv_heads, local_seq, head_dim); grouped heads stay as few as they are.
        attention_mask: what `mask` returned.
        given: of `_distributed`, or what the former implementation takes.

    Returns:
        out (batch, local_seq, heads, head_dim), and None for the weights.
    """
    forward = forward_of(module)
    if not forward.distributed:
        before = forward.context.before
        if before in _DENSE and given.get("indices") is not None:
            attention_mask = _chosen_alone(attention_mask, given.pop("indices"), key.shape[2], query.dtype)
        out: tuple[torch.Tensor, torch.Tensor | None] = _former(module, before)(
            module, query, key, value, attention_mask, **given
        )
        return out
    reach(NAME)
    return _distributed(module, (query, key, value), attention_mask, forward, **given)


_DENSE = ("eager", "sdpa")
"""The implementations for which a layer itself would hide the keys that its indexer has not chosen."""


def _chosen_alone(mask: Any, indices: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask (batch, 1, queries, keys), boolean or added, that shows a query its chosen keys alone."""
    hidden = indices.new_ones((*indices.shape[:2], keys), dtype=torch.bool).scatter(-1, indices.long(), False)[:, None]
    assert isinstance(mask, torch.Tensor), "an indexer has read it"
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(dtype).min)


def _former(module: torch.nn.Module, name: str) -> Any:
    """Return the function of an attention implementation; eager attention is one of each model's file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    files = (vars(sys.modules[cls.__module__]) for cls in type(module).__mro__)
    eager = next((names["eager_attention_forward"] for names in files if "eager_attention_forward" in names), None)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def _distributed(
    module: torch.nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | PlannedMask | None,
    forward: Forward,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of this rank's queries over the whole sequence; autocast is honoured.

    Args:
        scaling: of the scores; head_dim ** -0.5 if None.
        softcap: scores become softcap * tanh(scores / softcap); None for no cap.
        s_aux: (heads,), the layer's attention sinks.
        indices: (batch, local_seq, topk), the positions of the keys that an indexer has chosen; None for all.
    """
    (query, key, value), seen = qkv, forward.seen
    causal = is_causal is not False and (forward.images is not None or getattr(module, "is_causal", True))
    others |= {"attention dropout": dropout or None, "attention that is not causal": None if causal else True}
    for name, why in _NEVER.items():
        if others.get(name) is not None:
            asked = f"{name} in a layer of type {type(module).__name__}"
            raise UnsupportedError(asked, why, f"attention_dropout=0.0, and {CAUSAL}")
    near = _near_of(attention_mask, query.shape[2], key.shape[2])
    chunk = near if _type_of(module) == "chunked_attention" else None
    window = (-1, -1) if chunk or near is None or near >= forward.longest else (near - 1, 0)
    call = forward.where | {"softmax_scale": scaling, "sinks": s_aux}
    factors = None if indices is None else factors_of(module, value)
    query = tempered(module, query, forward)
    states = tuple(x.transpose(1, 2) for x in _autocast(query, key, value))
    # Without autocast: kernels choose their precision themselves.
    with torch.autocast(query.device.type, enabled=False), in_layer(module):
        if indices is not None and factors is not None:
            return attend(module, states, indices, forward, factors, call), None
        images = (forward.images or {}).get(_type_of(module) or "")
        if seen is None and (chunk or images):
            seen = ((0, forward.layout.length),) * len(query)
        return _of_rows(states, seen, images, (window, chunk), call | {"softcap": softcap or 0.0}), None


def _of_rows(
    qkv: tuple[torch.Tensor, ...],
    seen: Documents | Seen | None,
    images: tuple[Images, ...] | None,
    near: tuple[tuple[int, int], int | None],
    call: dict[str, Any],
) -> Any:
    """Compute attention of rows, each one document or with documents, or images, of its own: one call for all."""
    window, chunk = near
    if isinstance(seen, tuple) and chunk:
        seen = in_chunks(seen, chunk)
    if seen is None:
        return dist_flash_attn_func(*qkv, causal=True, window_size=window, **call)
    if isinstance(seen, tuple) and images is None:
        q, k, v = qkv
        return dist_flash_attn_varlen_func(q, k, v, seen, causal=True, window_size=window, **call)
    if images is None:  # the same for all rows
        return dist_flash_attn_func(*qkv, mask=mask_of(seen, (), window[0], chunk), **call)
    rows = (seen,) * len(images) if isinstance(seen, Seen) else seen
    masks = [mask_of(row, own, window[0], chunk) for row, own in zip(rows, images, strict=True)]
    return dist_flash_attn_func(*qkv, mask=masks, **call)


_NEVER = {
    "attention dropout": "the block kernels have no dropout",
    "attention that is not causal": "models are distributed with a causal mask",
    "position_bias": "the block kernels take no bias",
    "head_mask": "the block kernels mask no heads",
}


def _near_of(mask: Any, queries: int, keys: int) -> int | None:
    """Return the size of a layer's mask, None for all tokens; refuse masks that are not planned, and a key cache."""
    if queries != keys:
        raise UnsupportedError(
            f"attention of {queries} tokens over {keys}",
            "there is no key cache: every rank holds as many queries as keys",
            "with dfa_megatron.huggingface.local_attention(model), on whole sequences",
        )
    if mask is None:
        raise UnsupportedError(
            "attention without the mask that its model has made",
            "whoever took it out, as accelerate's context parallelism does, has left the layer without its window",
            "distribute_accelerator(accelerator, model), or distribute_trainer(trainer)",
        )
    if not getattr(mask, "planned", False):
        raise UnsupportedError(
            "a mask beyond causal and sliding window",
            "prefixes and blocks are not planned, and verify='off' does not see packed documents; under torch.compile "
            "transformers asks for such a mask whatever the batch",
            f"{CAUSAL}, in a model that is not compiled, or layer by layer",
        )
    size: int | None = mask.size
    if size is not None and size < 1:
        raise UnsupportedError(f"a window of {size} tokens", "a token sees itself", "one of 1 token or more")
    return size


def _type_of(module: torch.nn.Module) -> str | None:
    """Return the type that a layer was made as, or has in its configuration, which may list none for a copied one."""
    if own := getattr(module, "layer_type", None):
        return str(own)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    number: Any = getattr(module, "layer_idx", None)  # none where layers share an attention (Zamba)
    return None if types is None or number is None or number >= len(types) else str(types[number])


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast attention's inputs as autocast would: rotary embeddings leave q and k in float32, but not v."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in tensors)
