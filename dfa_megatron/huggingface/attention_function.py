"""The attention implementation `dfa` of transformers: what a layer calls, and what stands in for its mask."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext, run_of
from dfa_megatron.huggingface.padding import CAUSAL, refuse_ready_mask
from dfa_megatron.huggingface.parts.image_masks import ImageMask, Images, mask_of
from dfa_megatron.huggingface.positions.document_starts import KEYWORD, Documents, in_chunks
from dfa_megatron.huggingface.positions.prompt_trees import Tree, refuse_in_layer
from dfa_megatron.huggingface.positions.temperature import has_temperature, tempered
from dfa_megatron.huggingface.windows import OtherMask, WindowMask, chunk_of, window_of
from dfa_megatron.runtime.agreement.calls import at_layer

NAME = "dfa"
"""As in `model.set_attn_implementation(NAME)`. A name with "flash" in it would change how models build their inputs."""

_CHECKED = "_dfa_checked"
"""The attribute of a mask that need not be read."""


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
    attention_mask: torch.Tensor | WindowMask | ImageMask | OtherMask | None,
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
    if dropout:
        raise UnsupportedError(
            f"attention dropout {dropout}", "the block kernels have no dropout", "config.attention_dropout=0.0"
        )
    if is_causal is False:
        _refuse_not_causal()
    _check_layer(module, {"attn_logit_softcapping": softcap, "sinks": s_aux}, others)
    _check_tokens(query.shape[2], key.shape[2], attention_mask)
    assert not isinstance(attention_mask, torch.Tensor | OtherMask)
    images = attention_mask.images if isinstance(attention_mask, ImageMask) else None
    attention_mask = attention_mask.window if isinstance(attention_mask, ImageMask) else attention_mask
    windowed = attention_mask if isinstance(attention_mask, WindowMask) else None
    batch, whole = query.shape[0], query.shape[2] * context.size
    documents = others[KEYWORD] if KEYWORD in others else run_of(module)[0]
    tree, documents = (documents, None) if isinstance(documents, Tree) else (None, documents)
    query = tempered(module, query, documents, context.group)
    if chunk := chunk_of(module, windowed):
        windowed, documents = None, in_chunks(documents or ((0, whole),) * batch, chunk)
    window = window_of(module, windowed, sliding_window, whole)
    asked: dict[str, Any] = {
        "group": context.group,
        "causal": True,
        "softmax_scale": scaling,
        "window_size": window,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "config": context.options,
    }
    q, k, v = (x.transpose(1, 2) for x in _autocast(query, key, value))
    number = int(getattr(module, "layer_idx", None) or 0) + 1
    # Without autocast: kernels choose their precision themselves.
    with torch.autocast(query.device.type, enabled=False), at_layer(number):
        if tree is not None:
            counting = {
                "a window": window != (-1, -1),
                "chunks": chunk,
                "a temperature": has_temperature(module),
            }
            if any(counting.values()):
                refuse_in_layer(module, " and ".join(name for name, there in counting.items() if there))
            return _run_tree(q, k, v, tree, asked), None
        if images is not None:
            return _run_with_images((q, k, v), documents or ((0, whole),) * batch, images, asked), None
        return _run(q, k, v, documents, asked), None


def _refuse_not_causal() -> NoReturn:
    raise UnsupportedError("attention that is not causal", "models are distributed with a causal mask", CAUSAL)


def _check_layer(module: torch.nn.Module, passed: dict[str, Any], others: dict[str, Any]) -> None:
    """Refuse a layer that is not causal, or whose scores the kernels would not make.

    Args:
        passed: what a layer may have as an attribute and must hand over.
        others: the layer's other keywords.
    """
    layer = type(module).__name__
    if getattr(module, "is_causal", True) is False:
        _refuse_not_causal()
    if others.get("position_bias") is not None:
        asked = f"position_bias in a layer of type {layer}"
        raise UnsupportedError(asked, "the block kernels take no bias", CAUSAL)
    if others.get("head_mask") is not None:
        raise UnsupportedError(f"head_mask in a layer of type {layer}", "the block kernels mask no heads", CAUSAL)
    for name, value in passed.items():
        # A layer that has one of these and keeps it applies it in a way that would be lost here.
        if value is None and getattr(module, name, None) is not None:
            raise UnsupportedError(
                f"{name} in a layer of type {layer}",
                "the layer does not hand it to its attention implementation",
                "a layer that passes softcap and s_aux, as those of Gemma 2 and GPT-OSS do",
            )


def _check_tokens(queries: int, keys: int, mask: Any) -> None:
    """Refuse a key cache, and masks that the plan does not hold."""
    if queries != keys:
        raise UnsupportedError(
            f"attention of {queries} tokens over {keys}",
            "there is no key cache: every rank holds as many queries as keys",
            "with dfa_megatron.huggingface.local_attention(model), on whole sequences",
        )
    if isinstance(mask, OtherMask):
        raise UnsupportedError(
            "a mask beyond causal and sliding window",
            "prefixes and blocks are not planned, and verify='off' does not see packed documents; under torch.compile "
            "transformers asks for such a mask whatever the batch",
            f"{CAUSAL}, in a model that is not compiled",
        )
    if isinstance(mask, torch.Tensor):
        refuse_ready_mask()


def _run_with_images(
    qkv: tuple[torch.Tensor, ...], documents: Documents, images: tuple[Images, ...], asked: dict[str, Any]
) -> torch.Tensor:
    """Compute attention row by row, each with a mask of its own: the images of rows lie at other places."""
    left, _ = asked.pop("window_size")
    del asked["causal"]
    rows: list[Any] = [
        dist_flash_attn_func(*(x[row : row + 1] for x in qkv), mask=mask_of(images[row], offsets, left), **asked)
        for row, offsets in enumerate(documents)
    ]
    return torch.cat(rows)


def _run_tree(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: Tree, asked: dict[str, Any]) -> torch.Tensor:
    """Compute attention of segments that share prefixes."""
    del asked["causal"], asked["window_size"]
    out: Any = dist_flash_attn_func(q, k, v, mask=tree.mask, **asked)
    whole: torch.Tensor = out
    return whole


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents | None, asked: dict[str, Any]
) -> torch.Tensor:
    """Compute attention of whole sequences, or of packed documents row by row."""
    out: Any
    if documents is None:
        out = dist_flash_attn_func(q, k, v, **asked)
    else:
        out = [dist_flash_attn_varlen_func(*row, **asked) for row in zip(q, k, v, documents, strict=True)]
        out = out[0][None] if len(out) == 1 else torch.stack(out)
    whole: torch.Tensor = out
    return whole


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast attention's inputs as autocast would: rotary embeddings leave q and k in float32, but not v."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x if x.dtype is torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in tensors)


def nothing_hidden(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return a mask that hides nothing; given one, transformers does not look for documents in the positions."""
    everything = torch.ones(batch, length, dtype=torch.bool, device=device)
    setattr(everything, _CHECKED, True)
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
    from transformers.masking_utils import causal_mask_function

    hides = attention_mask is not None and not hasattr(attention_mask, _CHECKED) and not bool(attention_mask.all())
    if hides:
        raise UnsupportedError(
            "an attention_mask with padding",
            "padded tokens would be attended to",
            "padding on the right, which is checked and removed before the layers see it",
        )
    if not allow_is_causal_skip and mask_function is not causal_mask_function:
        return OtherMask()
    return None if local_size is None else WindowMask(local_size)
