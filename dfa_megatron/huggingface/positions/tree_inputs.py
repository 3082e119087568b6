"""Take from a call's arguments what `shard_batch` adds for the decoder alone: a prompt tree, the number of a batch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext
from dfa_megatron.huggingface.parts.text_part import is_distributed
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.positions.document_starts import FLASH_KEYS
from dfa_megatron.huggingface.positions.embedded_positions import padding_of
from dfa_megatron.huggingface.positions.prompt_trees import KEY, Tree, tree_of
from dfa_megatron.sharding import shard_sequence


def take_added(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Keep them for the decoder, as a forward pre-hook: a model's own forward need not know the keys.

    Raises:
        UnsupportedError: attention is the model's own.
    """
    context: LayerContext = getattr(module, CONTEXT)
    context.current.told |= taken(kwargs, context, distributed=is_distributed(module))
    return args, {name: value for name, value in kwargs.items() if name not in (KEY, batch_number.KEY)}


def taken(kwargs: dict[str, Any], context: LayerContext, *, distributed: bool) -> dict[str, Any]:
    """Return what was added to a call's arguments.

    Raises:
        UnsupportedError: attention is local.
    """
    if KEY in kwargs and not distributed:
        _refuse_for("a model with its own attention")
    if batch_number.KEY in kwargs and context.size > 1 and not distributed:
        raise UnsupportedError(
            "a batch of shard_batch with local attention",
            f"it is this rank's part of sequences that {context.size} ranks share, and attention would end with the "
            "part",
            "whole sequences within local_attention, and in evaluation under accelerate; or distributed attention, in "
            "model.train() within torch.no_grad() under accelerate",
        )
    return {name: kwargs[name] for name in (KEY, batch_number.KEY) if name in kwargs}


def segments(told: Any, decoder: Any, kwargs: dict[str, Any], tokens: torch.Tensor) -> tuple[Tree, torch.Tensor]:
    """Return the segments of every row, and the positions of this rank's tokens.

    Raises:
        UnsupportedError: they do not fit the tokens, or the decoder would count other positions.
    """
    context: LayerContext = getattr(decoder, CONTEXT)
    if context.parts:
        _refuse_for("a model of several parts")
    if padding_of(decoder) is not None:
        _refuse_for("a table behind its padding")
    beside = [name for name in FLASH_KEYS if kwargs.get(name) is not None]
    tree = tree_of(told, tokens.shape[1] * context.size, beside)
    return tree, shard_sequence(tree.positions(tokens.device), group=context.group)


def _refuse_for(model: str) -> NoReturn:
    raise UnsupportedError(
        f"a prompt_tree for {model}",
        "tokens of one path would be taken for those of another",
        "a distributed model of text whose positions are counted from 0",
    )
