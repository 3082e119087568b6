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
from dfa_megatron.huggingface.current_forward import Arguments, Forward, innermost
from dfa_megatron.huggingface.seen import refuse_positions

_SECTIONS = "mrope_section"
"""The field of a config, or of a rotary module, that divides a head among the axes."""


def places(decoder: Any, given: Arguments, *, whole: bool) -> torch.Tensor | None:
    """Return the places of a call's tokens (batch or 1, seq): its position_ids, or their first row if these are axes.

    None without position_ids, and for the three axes of a tower's own, of a whole model.
    """
    positions: torch.Tensor | None = given.get("position_ids")
    if positions is None or (whole and positions.dim() == 3):
        return None if positions is None or len(positions) == 3 else positions[0]
    if has_axes(decoder):
        if positions.dim() == 3 and len(positions) == 4:
            return positions[0]
        if positions.dim() == 3 or given.get("inputs_embeds") is not None:
            refuse_axes(decoder, positions, embedded=positions.dim() == 2)
    if positions.dim() != 2:
        refuse_positions(positions)
    return positions


def refuse_axes(decoder: Any, given: torch.Tensor, *, embedded: bool) -> NoReturn:
    """Refuse position_ids without places or axes."""
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


def local_ropes(rotary: Any) -> set[str]:
    """Return the types of a rotary embedding whose frequencies depend on the longest position in the batch."""
    kinds = getattr(rotary, "rope_type", None)  # one, or by kind of layer
    return {"dynamic", "longrope"} & {*(kinds.values() if isinstance(kinds, dict) else (kinds,))}


def hook(decoder: Any) -> None:
    """Hook the rotary embeddings that a decoder calls itself and whose frequencies depend on the batch, once."""
    for rotary in (child for child in decoder.children() if local_ropes(child)):
        if _with_longest not in rotary._forward_pre_hooks.values():
            rotary.register_forward_pre_hook(_with_longest, with_kwargs=True)
            rotary.register_forward_hook(_without_longest)


def _longest() -> int:
    """Return the tokens of the longest document of the forward that runs; 0 for a local one."""
    call = innermost()
    return 0 if call is None else call.forward.longest


def _with_longest(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not (longest := _longest()):
        return None
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    del given["self"]
    positions: torch.Tensor = given["position_ids"]
    last = positions.new_full((*positions.shape[:-1], 1), longest - 1)
    return (), given | {"position_ids": torch.cat((positions, last), -1)}


def _without_longest(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    if not _longest():
        return None
    cut = [x[..., :-1, :] for x in (output if isinstance(output, tuple) else (output,))]
    return tuple(cut) if isinstance(output, tuple) else cut[0]


def tempered(layer: Any, query: torch.Tensor, forward: Forward) -> torch.Tensor:
    """Return queries (batch, heads, local_seq, head_dim), scaled by places in this rank's part, with the right scale.

    A layer without a temperature gets its queries back as they are.
    """
    if not getattr(layer, "attn_temperature_tuning", False) or getattr(layer, "use_rope", True):
        return query
    assert forward.positions is not None
    ratio = _scale(layer, forward.positions) / _scale(layer, torch.arange(query.shape[2], device=query.device)[None])
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _scale(layer: Any, places: torch.Tensor) -> torch.Tensor:
    """Return the scale as the fields of Llama 4's configuration define it."""
    scale: torch.Tensor = torch.log1p(((places + 1.0) / layer.floor_scale).floor()) * layer.attn_scale + 1.0
    return scale
