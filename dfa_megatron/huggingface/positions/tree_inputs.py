"""Take a prompt tree from the arguments of a model's call, and check that the model can be given one."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext
from dfa_megatron.huggingface.parts.text_part import is_distributed
from dfa_megatron.huggingface.positions.document_starts import FLASH_KEYS
from dfa_megatron.huggingface.positions.embedded_positions import padding_of
from dfa_megatron.huggingface.positions.prompt_trees import KEY, Tree, tree_of
from dfa_megatron.huggingface.refusals import INPUTS
from dfa_megatron.sharding import shard_sequence


def take_tree(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Keep a tree for the decoder, as a forward pre-hook: a model's own forward need not know the key.

    Raises:
        UnsupportedError: attention is the model's own.
    """
    context: LayerContext = getattr(module, CONTEXT)
    if KEY not in kwargs:
        return None
    INPUTS.check(no_tree=None if is_distributed(module) else "a model with its own attention")
    kept = dict(kwargs)
    context.current.told[KEY] = kept.pop(KEY)
    return args, kept


def segments(told: Any, decoder: Any, kwargs: dict[str, Any], tokens: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    """Return the segments of every row, and the positions of this rank's tokens.

    Raises:
        UnsupportedError: they do not fit the tokens, or the decoder would count other positions.
    """
    context: LayerContext = getattr(decoder, CONTEXT)
    others = {"a model of several parts": context.parts, "a table behind its padding": padding_of(decoder) is not None}
    INPUTS.check(no_tree=" and ".join(name for name, there in others.items() if there))
    beside = [name for name in FLASH_KEYS if kwargs.get(name) is not None]
    tree = tree_of(told, tokens.shape[1] * context.size, beside)
    return tree, shard_sequence(tree.positions(tokens.device), group=context.group)
