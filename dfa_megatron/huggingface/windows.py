"""Read the sliding window of an attention layer from its mask, as in eager attention.

Models hand windows to their layers in masks. Many layers name theirs to the attention implementation as well, by a
keyword, which is all that flash attention honours; eager attention honours the mask alone. So what stands in for a mask
here keeps its window, and a layer that says something else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.huggingface.refusals import ATTENTION


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Stands in for a causal mask with a sliding window. No tensor: nothing on its way to a layer copies or casts it.

    size: tokens that a token sees, itself among them.
    """

    size: int

    def __getitem__(self, index: tuple[slice, ...]) -> WindowMask:
        """Itself, for the slice of all rows that models with shared keys take on their way (Gemma 4).

        Raises:
            UnsupportedError: of some rows.
        """
        ATTENTION.check(some_rows=any(part not in (slice(None), slice(0, None)) for part in index))
        return self


def window_of(module: torch.nn.Module, mask: WindowMask | None, named: int | None, whole: int) -> tuple[int, int]:
    """Return a layer's window as (left, right), (-1, -1) for none.

    Args:
        mask: what the layer has for a mask; None for one that is causal and no more.
        named: its keyword `sliding_window`.
        whole: length of the sequence; a window that is as long hides nothing.

    Raises:
        UnsupportedError: mask, keyword and the configuration's type of the layer do not say the same.
    """
    size = whole if mask is None else min(mask.size, whole)
    if mask is None and named is None:
        named = _of_its_type(module)
    if size < 1 or (named is not None and min(named, whole) != size):
        mask_window = "no window" if mask is None else f"one of {mask.size}"
        ATTENTION.check(window=str(named), layer=type(module).__name__, mask_window=mask_window)
    return (-1, -1) if size == whole else (size - 1, 0)


def _of_its_type(module: torch.nn.Module) -> int | None:
    """The window of a layer that the configuration calls sliding. (`sliding_window` alone is often a leftover.)"""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    sliding = types is not None and types[module.layer_idx] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None
