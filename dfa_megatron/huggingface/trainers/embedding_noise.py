"""Scale NEFTune's noise by the length of whole sequences; transformers' hook divides by that of this rank's part."""

from __future__ import annotations

import math
from typing import Any

import torch

from dfa_megatron.huggingface.layer_context import LayerContext

_ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings by which transformers' hook scales the noise, over the root of length and width."""


def scale_noise(decoder: Any, tokens: torch.Tensor, context: LayerContext) -> None:
    """Let this forward's noise be that of whole sequences; called before a decoder embeds its tokens.

    Args:
        decoder: it embeds the tokens itself, unless they are embeddings already.
        tokens: (batch, local_seq) or (batch, local_seq, hidden).
        context: that of the decoder.
    """
    embeddings = decoder.get_input_embeddings()
    alpha: float | None = getattr(embeddings, _ALPHA, None)
    if alpha is None or context.size == 1 or tokens.dim() != 2:
        return
    local = tokens.shape[1]
    whole = local * context.size - context.current.added
    setattr(embeddings, _ALPHA, alpha * math.sqrt(local / whole))

    def restore(*_: Any) -> None:
        setattr(embeddings, _ALPHA, alpha)
        handle.remove()

    handle = embeddings.register_forward_hook(restore, always_call=True)  # it runs behind transformers' hook
