"""Compute the positions that a model embeds from the places of its tokens in their sequence or document.

In most models position and place are equal. Language models for images count along three axes.

RoPE of the types `dynamic` and `longrope` takes its frequencies from the longest position that it is given: it is given
that of the longest document as well. The decoder itself calls it, outside the layers that may be recomputed. Llama 4's
layers without RoPE scale their queries by places: they get the scale of the whole document.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.current_forward import Forward, forward_of
from dfa_megatron.sharding import local_positions

_SECTIONS = "mrope_section"
"""The field of a config, or of a rotary module, that divides a head among the axes."""


def places(decoder: Any, kwargs: dict[str, Any], *, whole: bool) -> torch.Tensor | None:
    """Return the places of a call's tokens: its position_ids, or their first row if there are several axes.

    None without position_ids, and for the three axes of a tower's own, of whole sequences.

    Raises:
        UnsupportedError: position_ids without places, or embeddings, which may be of images, without axes.
    """
    given: torch.Tensor | None = kwargs.get("position_ids")
    if whole and given is not None and given.dim() == 3:
        return None if given.shape[0] == 3 else given[0]
    if given is None or not has_axes(decoder):
        return given
    if given.dim() == 3 and given.shape[0] == 4:
        return given[0]
    if given.dim() == 3 or kwargs.get("inputs_embeds") is not None:
        refuse_axes(decoder, given, embedded=given.dim() == 2)
    return given


def refuse_positions(given: torch.Tensor | None) -> NoReturn:
    """Refuse positions that are not those of the tokens of a batch.

    Raises:
        UnsupportedError: always.
    """
    ends = ""
    if given is not None:
        flat = given.flatten()
        first = f"from {int(flat[0])} to {int(flat[-1])}" if flat.numel() else "without a token"
        ends = f"position_ids {first} of shape {tuple(given.shape)}: "
    raise UnsupportedError(
        "position_ids that are not those of documents, or of a tree, or the same in all rows of a mask",
        f"{ends}each document, and so each row, must begin at 0 and go up by 1",
        "as DataCollatorWithFlattening of transformers makes them for a whole batch, or none for one document a "
        "sequence; for models with axes (4, batch, seq), these first",
    )


def refuse_axes(decoder: Any, given: torch.Tensor, *, embedded: bool) -> NoReturn:
    """Refuse position_ids without places or axes.

    Raises:
        UnsupportedError: always.
    """
    shape, of, kind = tuple(given.shape), "inputs_embeds in " if embedded else "", decoder.config.model_type
    raise UnsupportedError(
        f"position_ids of shape {shape} for {of}a {kind} model",
        "the tokens of images have positions along several axes, and beside them a token's place in the sequence must "
        "be known",
        "position_ids (4, batch, seq) of the whole batch: the places, then the axes; or input_ids of text",
    )


def has_axes(decoder: Any) -> bool:
    """Return whether a language model embeds positions along several axes."""
    rope = getattr(decoder.config, "rope_parameters", None) or getattr(decoder.config, "rope_scaling", None) or {}
    return bool(rope.get(_SECTIONS) or getattr(getattr(decoder, "rotary_emb", None), _SECTIONS, None))


LOCAL_ROPE = ("dynamic", "longrope")
"""Types of rotary embeddings whose frequencies depend on the longest position in the batch."""


def rotaries_of(decoder: Any) -> list[torch.nn.Module]:
    """Return the rotary embeddings that a decoder calls itself and whose frequencies depend on the batch."""
    kinds = {child: getattr(child, "rope_type", None) for child in decoder.children()}  # one, or by kind of layer
    return [c for c, k in kinds.items() if any(x in LOCAL_ROPE for x in (k.values() if isinstance(k, dict) else (k,)))]


def hook(decoder: Any) -> None:
    """Hook these modules, which need a `LayerContext` when they run."""
    for rotary in rotaries_of(decoder):
        rotary.register_forward_pre_hook(_with_longest, with_kwargs=True)
        rotary.register_forward_hook(_without_longest)


def _with_longest(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not (longest := forward_of(module).longest):
        return None
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    del given["self"]
    positions: torch.Tensor = given["position_ids"]
    last = positions.new_full((*positions.shape[:-1], 1), longest - 1)
    return (), given | {"position_ids": torch.cat((positions, last), -1)}


def _without_longest(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    if not forward_of(module).longest:
        return None
    cut = [x[..., :-1, :] for x in (output if isinstance(output, tuple) else (output,))]
    return tuple(cut) if isinstance(output, tuple) else cut[0]


def has_temperature(layer: Any) -> bool:
    """Return whether an attention layer scales its queries by their places."""
    return bool(getattr(layer, "attn_temperature_tuning", False)) and not getattr(layer, "use_rope", True)


def tempered(layer: Any, query: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Return queries (batch, heads, local_seq, head_dim), scaled by places in this rank's part, with the right scale.

    A layer without a temperature gets its queries back as they are.
    """
    if not has_temperature(layer):
        return query
    local, places = query.shape[2], forward.positions
    if places is None:  # a layer that is called alone
        places = local_positions(local * forward.context.size, group=forward.context.group, device=query.device)[None]
    ratio = _scale(layer, places) / _scale(layer, torch.arange(local, device=query.device)[None])
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _scale(layer: Any, places: torch.Tensor) -> torch.Tensor:
    """Return the scale as the fields of Llama 4's configuration define it."""
    scale: torch.Tensor = torch.log1p(((places + 1.0) / layer.floor_scale).floor()) * layer.attn_scale + 1.0
    return scale
