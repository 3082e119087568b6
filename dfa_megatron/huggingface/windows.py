"""Read the sliding window or the chunk of an attention layer from its mask, as in eager attention.

Models pass windows to their layers in masks. Many layers also pass a keyword to the attention implementation. Flash
attention honours the keyword only, eager attention the mask only. `WindowMask` replaces a mask and keeps its window. A
layer whose keyword disagrees is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch

from dfa_megatron.errors import UnsupportedError


class OtherMask:
    """Replace a mask beyond causality and windows, for a layer that may never run. Models do not copy it: no tensor."""

    def __getitem__(self, index: Any) -> Self:
        """Return itself for any slice."""
        return self

    def to(self, *_: Any) -> Self:
        """Return itself for any dtype."""
        return self


@dataclass(frozen=True, slots=True)
class WindowMask(OtherMask):
    """Replace a causal mask with a sliding window or chunks.

    size: tokens that a token sees, including itself; of layers with chunks, the tokens of a chunk.
    """

    size: int

    def __getitem__(self, index: tuple[slice, ...]) -> Self:
        """Return itself for a slice of all rows, which models with shared keys take (Gemma 4).

        Raises:
            UnsupportedError: a slice of some rows.
        """
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise UnsupportedError(
                "logits_to_keep in a model whose layers share keys",
                "the layers that share them would have fewer queries than keys",
                "logits_to_keep=0",
            )
        return self


def window_of(module: torch.nn.Module, mask: WindowMask | None, named: int | None, whole: int) -> tuple[int, int]:
    """Return a layer's window as (left, right), (-1, -1) for none.

    Args:
        mask: the layer's mask; None for a causal mask without a window.
        named: the layer's keyword `sliding_window`.
        whole: length of the sequence; a window of this length hides nothing.

    Raises:
        UnsupportedError: mask, keyword and the layer's type in the configuration disagree.
    """
    size = whole if mask is None else min(mask.size, whole)
    if mask is None and named is None and type_of(module) == "sliding_attention":  # else it may be a leftover
        named = getattr(module.config, "sliding_window", None)
    if size < 1 or (named is not None and min(named, whole) != size):
        seen = "no window" if mask is None else f"one of {mask.size}"
        instead = "a window of one token or more that the layer's mask has, or no sliding_window"
        _refuse(f"sliding_window={named}", module, seen, instead)
    return (-1, -1) if size == whole else (size - 1, 0)


def chunk_of(module: torch.nn.Module, mask: WindowMask | None) -> int | None:
    """Return the tokens of a chunk, if the layer's type is chunked attention; None for other layers.

    Raises:
        UnsupportedError: the layer's mask has no chunks of this size.
    """
    if type_of(module) != "chunked_attention":
        return None
    config: Any = module.config
    size: int = config.attention_chunk_size
    if mask is None or mask.size != size:
        seen = "none" if mask is None else f"those of {mask.size}"
        _refuse(f"chunks of {size} tokens", module, seen, "attention_chunk_size as in the model's masks")
    return size


def _refuse(what: str, module: torch.nn.Module, seen: str, instead: str) -> NoReturn:
    asked = f"{what} in a layer of type {type(module).__name__} whose mask has {seen}"
    raise UnsupportedError(asked, "attention implementations would differ in which tokens are visible", instead)


def type_of(module: torch.nn.Module) -> str | None:
    """Return the type that a layer was made as, or has in its configuration, which may list none for a copied one."""
    if own := getattr(module, "layer_type", None):
        return str(own)
    types = getattr(getattr(module, "config", None), "layer_types", None)
    number: Any = getattr(module, "layer_idx", None)  # none where layers share an attention (Zamba)
    return None if types is None or number is None or number >= len(types) else str(types[number])
