"""Embed first, then shard, in both stacks of an encoder-decoder model: it is given whole sequences on every rank.

Each stack embeds them, positions, convolutions and all. Its first layer takes this rank's part, of any length. From
there on tokens are this rank's, and the decoder's queries attend to the encoder's tokens of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.attention_function import nothing_hidden
from dfa_megatron.huggingface.checks.check_pair import SIDE
from dfa_megatron.huggingface.checks.padding import check_right
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    WHOLE,
    Arguments,
    Forward,
    LayerContext,
    TwoSequences,
    forward_of,
)
from dfa_megatron.huggingface.loss import mean_of_sequences
from dfa_megatron.huggingface.positions import batch_number
from dfa_megatron.huggingface.tiles.tiled_head import summed_loss
from dfa_megatron.plan.language.layout import cross
from dfa_megatron.sharding import shard_sequence

_WHOLE = ("input_ids", "input_features", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "labels")
_OPTIONS = ("return_dict", "output_hidden_states", "use_cache")


def hook(model: Any) -> None:
    """Register the hooks of a model and of its stacks' first layers, which need a `Forward` when they run."""
    model.register_forward_hook(lambda own, *call: None if forward_of(own).whole else with_loss(own, *call))
    for first in firsts_of(model):
        first.register_forward_pre_hook(_cut)


def firsts_of(model: Any) -> list[torch.nn.Module]:
    """Return the first layer of each stack."""
    return [stack.layers[0] for stack in (model.get_encoder(), model.get_decoder())]


def take_whole(model: Any, given: Arguments, context: LayerContext) -> tuple[Arguments, Forward]:
    """Return the arguments for a model, and the forward of two whole sequences, which are the same on every rank.

    Raises:
        UnsupportedError: the call asks for what is wrong on parts of sequences, or the ranks' batches differ.
    """
    given = {name: x for name, x in given.items() if x is not None and name != WHOLE}
    kept, pair = _taken(model, given, context)
    if context.options.verify != "off":
        ids = kept["decoder_input_ids"]
        batch = {name: given[name] for name in _WHOLE if name in given} | {"decoder_input_ids": ids}
        batch_number.check_same(batch_number.number_of(batch), context.group, ids.device)
    return kept, Forward(context, distributed=True, pair=pair, layout=pair.layouts["decoder"])


def _taken(model: Any, given: Arguments, context: LayerContext) -> tuple[Arguments, TwoSequences]:
    """Return the arguments for a model, without masks and labels, and the two sequences.

    Labels would make the model take the mean over this rank's tokens, and shift logits that are not whole.
    """
    others = ", ".join(name for name in given if name not in (*_WHOLE, *_OPTIONS))
    others = others or "use_cache" * bool(given.get("use_cache"))
    if others or not {"input_ids", "input_features"} & {*given}:
        raise UnsupportedError(
            f"{others or 'no input_ids or input_features'} for an encoder-decoder model",
            "it takes whole sequences of tokens, or of sound, and cuts them itself",
            f"{', '.join(_WHOLE)}; whole sequences, caches and generation within local_attention(model)",
        )
    labels, kept = given.get("labels"), {n: x for n, x in given.items() if n != "labels"}
    if "decoder_input_ids" not in given:
        shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if labels is None or shifted is None:
            raise UnsupportedError(
                "no decoder_input_ids",
                "the model would make them of this rank's labels, or of the encoder's tokens",
                "decoder_input_ids: the labels of whole sequences, shifted to the right",
            )
        kept["decoder_input_ids"] = shifted(labels)
    if (mask := given.get("decoder_attention_mask")) is not None:
        check_right(mask, labels=labels)
    tokens, mask = kept["decoder_input_ids"], kept.pop("attention_mask", None)
    rows, length = tokens.shape
    real, of_encoder = None, getattr(model.config, "max_source_positions", 0)
    if "input_features" not in given:  # a mask of sound hides nothing in the encoder
        of_encoder = given["input_ids"].shape[1]
        kept["attention_mask"] = nothing_hidden(rows, of_encoder, tokens.device)
        if mask is not None:
            check_right(mask)
            real = None if bool(mask.all()) else tuple(mask.sum(1).tolist())
    kept |= {"decoder_attention_mask": nothing_hidden(rows, length, tokens.device), "use_cache": False}
    encoder, decoder = (
        batch_number.layout_of_rows(None, tokens, context.size, whole=True) for tokens in (of_encoder, length)
    )
    mine = None if labels is None else shard_sequence(labels, group=context.group, layout=decoder)
    return kept, TwoSequences({"encoder": encoder, "decoder": decoder, "cross": cross(decoder, encoder)}, real, mine)


def _cut(layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Give the first layer of a stack this rank's part of the hidden states (batch, length, width)."""
    pair, side = forward_of(layer).pair, getattr(layer, SIDE)
    if pair is None:
        return None
    layout, context = pair.layouts[side], getattr(layer, CONTEXT)
    if args[0].shape[1] != layout.length:
        raise UnsupportedError(
            f"{args[0].shape[1]} tokens in the {side}, of a batch with {layout.length}",
            "what is before the layers changes their number, so that it is not known which of them masks hide",
            "an encoder of tokens, or that of Whisper",
        )
    return (shard_sequence(args[0], group=context.group, layout=layout), *args[1:])


def with_loss(model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return the output with the loss of labels that are those of the same tokens; None without labels.

    It is scaled as by `causal_lm_loss`. Trainer's count divides a smoothed one in place of the number of labels.
    """
    forward = forward_of(model)
    if forward.pair is None or (labels := forward.pair.labels) is None:
        return None
    whole, divisor = isinstance(output, tuple), None if forward.whole is None else forward.whole.divisor
    smoothing = getattr(model.loss_function, "keywords", {}).get("label_smoothing", 0.0)
    loss = summed_loss(output[0] if whole else output.logits, labels, label_smoothing=smoothing)
    if divisor is None or not smoothing:
        loss = mean_of_sequences(loss, labels, forward.context.group)
    loss = loss if divisor is None else loss / divisor
    return (loss, *output) if whole else type(output)(loss=loss, **output)
