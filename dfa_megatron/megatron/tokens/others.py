"""Refuse Megatron's own layers, for instance in a teacher beside the model, if all batches are sliced in order."""

from __future__ import annotations

import functools
from typing import Any

from dfa_megatron.megatron.hybrid.recomputed import RecomputedLayer
from dfa_megatron.megatron.layers.layer import DistributedAttentionLayer
from dfa_megatron.megatron.refusals import LAYERS

_MARK = "_dfa_megatron"


def refuse_other_layers() -> None:
    """Make the constructor of Megatron's TransformerLayer refuse layers that are not of this package.

    This holds for configs with several context-parallel ranks. Megatron's attention would read the tokens in zigzag
    order, and no tensor would show the mistake. A second call changes nothing.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    megatrons = TransformerLayer.__init__
    if hasattr(megatrons, _MARK):
        return

    @functools.wraps(megatrons)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        megatrons(self, *args, **kwargs)
        other = not isinstance(self, (DistributedAttentionLayer, RecomputedLayer))
        LAYERS.check(other_layer=other, context_parallel_size=self.config.context_parallel_size)

    setattr(checked, _MARK, megatrons)
    TransformerLayer.__init__ = checked
