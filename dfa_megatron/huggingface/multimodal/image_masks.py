"""The masks of models whose image tokens attend to each other in both directions (Gemma 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.huggingface.windows import WindowMask
from dfa_megatron.plan.language.mask import Mask, two_way_blocks
from dfa_megatron.runtime.cu_seqlens import Offsets

Images = tuple[tuple[int, int], ...]
"""The first token of each image and the one behind its last, in the sequence of all ranks, of one row."""

_BOTH_WAYS = {
    "gemma3": ("token_type_ids", (1,), {"full_attention", "sliding_attention"}),
    "gemma4": ("mm_token_type_ids", (1, 2), {"sliding_attention"}),
}
"""By type of model: the argument that marks images, its values there, and the kinds of layers that see both ways."""


@dataclass(frozen=True, slots=True)
class ImageMask:
    """Replace a causal mask in which the tokens of an image see each other too. It is no tensor.

    window: the mask without images, None for one that is causal only.
    images: of every row.
    """

    window: WindowMask | None
    images: tuple[Images, ...]


def take_images(model: Any, kwargs: dict[str, Any]) -> dict[str, tuple[Images, ...]] | None:
    """Take the marks of images out of a call's arguments, and return where they are, by kind of layer.

    The model then makes causal masks. None if there are no images, or its masks are causal; waits for the device.
    """
    name, values, kinds = _BOTH_WAYS.get(model.config.model_type, ("", (), set()))
    causal = name == "mm_token_type_ids" and model.config.get_text_config().use_bidirectional_attention != "vision"
    marks: torch.Tensor | None = None if causal else kwargs.pop(name, None)
    if marks is None:
        return None
    seen = torch.isin(marks, torch.tensor(values, device=marks.device)).int()
    edges = torch.nn.functional.pad(seen, (1, 1)).diff().cpu()
    if not bool(edges.any()):
        return None
    found = tuple(
        tuple(zip((row == 1).nonzero().flatten().tolist(), (row == -1).nonzero().flatten().tolist(), strict=True))
        for row in edges
    )
    return dict.fromkeys(kinds, found)


@lru_cache(maxsize=64)
def mask_of(images: Images, documents: Offsets, left: int) -> Mask:
    """Return the mask of a row, the same object for all layers.

    Args:
        documents: token offsets of the row's documents; an image that reaches over two is one in each.
        left: tokens before itself that a token sees, -1 for all.
    """
    blocks = [
        (max(lo, first), min(hi, last))
        for first, last in pairwise(documents)
        for lo, hi in images
        if lo < last and first < hi
    ]
    return two_way_blocks([hi - lo for lo, hi in pairwise(documents)], blocks, left)
