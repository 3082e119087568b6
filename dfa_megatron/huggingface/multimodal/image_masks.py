"""Where the images are whose tokens attend to each other in both directions (Gemma 3 and 4)."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.huggingface.positions.seen import Images

_BOTH_WAYS = {
    "gemma3": ("token_type_ids", (1,), {"full_attention", "sliding_attention"}),
    "gemma4": ("mm_token_type_ids", (1, 2), {"sliding_attention"}),
}
"""By type of model: the argument that marks images, its values there, and the kinds of layers that see both ways."""


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
