"""Make the `Forward` of a call from its whole batch, and cut it at the decoder's door.

    model(**whole batch)     begin: read the batch, cut labels, compare it with the other ranks'; enter the forward
      decoder(**whole)       prepare: this rank's part of tokens and positions; a mask that hides nothing
        layers               attention and the others find the forward
      loss                   finish: the mean of the ranks' losses, on every rank

A decoder may be called alone. While attention is the model's own, the hooks only say so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import batch as whole
from dfa_megatron.huggingface import decoder_door as door
from dfa_megatron.huggingface.attention_function import nothing_hidden
from dfa_megatron.huggingface.batch import first_of, tokens_of
from dfa_megatron.huggingface.check_model import check_adapters, check_model
from dfa_megatron.huggingface.checkpointing import keep_forward
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    Arguments,
    Forward,
    LayerContext,
    enter,
    forward_of,
    forward_of_context,
)
from dfa_megatron.huggingface.hook_mixers import adopt, knows_all
from dfa_megatron.huggingface.indexers import whole_loss
from dfa_megatron.huggingface.join_outputs import HOOKED, classifies
from dfa_megatron.huggingface.loss import as_whole, check_loss, check_reached
from dfa_megatron.huggingface.seen import refuse_for
from dfa_megatron.huggingface.tiled_head import tile_of
from dfa_megatron.kernels.leaf import outside_graphs
from dfa_megatron.runtime.comm.weights import FIRST, STEPPED, changes, check_weights
from dfa_megatron.whole_batch import MASK, TREE, check_same

_ALPHA = "neftune_noise_alpha"
"""The attribute of embeddings by which transformers' hook scales NEFTune's noise, over the root of length and width."""

_SAME = (
    "a DistributedSampler with num_replicas and rank of the groups, not of all ranks; loaders prepared after "
    "distribute_accelerator; the same data set, collator and seed"
)
"""What works where the ranks of a group have other batches."""

_CACHES = ("past_key_values", "cache")  # before and since transformers 5.24

ArgsAndKeywords = tuple[tuple[Any, ...], Arguments]


@outside_graphs
def begin(model: Any, args: tuple[Any, ...], kwargs: Arguments) -> ArgsAndKeywords:
    """Make the forward of a model's call, or of a decoder's that is called alone, enter it, and cut the labels.

    Raises:
        UnsupportedError: the call asks for what is wrong on parts of sequences, or the ranks give other batches.
        DisagreementError: the ranks hold other weights, or another rank refuses its batch.
    """
    context: LayerContext = getattr(model, CONTEXT)
    check_adapters(model)  # which may be added later than attention is distributed
    parameters = () if context.local else tuple(model.parameters())
    if context.size > 1 and any(hasattr(x, "grad_sample") for x in parameters):
        why, instead = "a rank has those of its tokens alone", "gradients of batches, without a GradSampleModule"
        raise UnsupportedError("gradients of single rows, as Opacus clips them", why, instead)
    if getattr(model.get_decoder(), CONTEXT, None) is not context:
        what = f"a {type(model).__name__} whose decoder was replaced, or distributed by itself, since"
        raise UnsupportedError(what, "it would not know the documents of a batch", "distribute_attention of the model")
    if not knows_all(model, context):  # layers were copied or replaced
        adopt(model, context, check_model(model, unlisted=context.unlisted))
    if torch.is_grad_enabled():
        keep_forward(model, saving=context.options.checkpoint == "auto")
    given = whole.arguments_of(model, args, kwargs)
    tile = tile_of(model, given)
    if context.local:
        if first_of(given, (TREE, MASK)) is not None:
            refuse_for("a model with its own attention")
        enter(model, Forward(context, distributed=False, tile=tile))
        return args, {name: x for name, x in kwargs.items() if name not in (TREE, MASK)}
    verified = bool(context.group) and context.options.verify != "off"
    try:
        kept, forward = _read(model, given)
    except Exception:
        if verified:  # the others wait for this rank's number
            check_same(context.group, None, _SAME)
        raise
    if verified and check_same(context.group, whole.told(given), _SAME, asks=_changed(model, context, parameters)):
        check_weights(model, context.group, STEPPED if context.compared else FIRST)
        now = changes(model)
        context.compared += (now, now) if now is None else (now,)
    enter(model, replace(forward, tile=tile))
    return (), kept


_MET = "_dfa_met"
"""The attribute of a parameter for the group whose ranks have met it. An id would be the next one's that lies there."""


def _changed(model: Any, context: LayerContext, parameters: tuple[torch.nn.Parameter, ...]) -> bool:
    """Return whether to compare weights: in the first call of these parameters, and after the first step with them."""
    for new in (x for x in parameters if getattr(x, _MET, None) != context.group):
        setattr(new, _MET, context.group)
        context.compared = ()  # layers, adapters or rows that came later may be drawn on each rank
    known = context.compared
    return not known or (len(known) < 2 and torch.is_grad_enabled() and changes(model) not in known)


def compare_again(decoder: Any, *_: Any) -> None:
    """Forget that the ranks have compared their weights, because others were loaded."""
    getattr(decoder, CONTEXT).compared = ()


def _read(model: Any, given: Arguments) -> tuple[Arguments, Forward]:
    """Return the arguments for a model, or for a decoder that is called alone, and the forward of a whole batch."""
    context: LayerContext = getattr(model, CONTEXT)
    given = {name: x for name, x in given.items() if x is not None}
    tokens_of(given)
    _check_call(given, context)
    check_loss(model, given, context)
    decoder = model.get_decoder()
    if context.multimodal and model is not decoder:
        door.check_whole(decoder, given)
    shifted: torch.Tensor | None = given.get("shift_labels")
    if shifted is None and "labels" in given:
        shifted = whole.next_labels(given["labels"])
    forward = whole.forward_of_batch(decoder, given, shifted, context)
    given |= whole.cut_labels(shifted, given.get("num_items_in_batch"), context)
    kept, images = door.for_model(model, given, forward.seen)
    return kept, replace(forward, images=images)


def _check_call(given: Arguments, context: LayerContext) -> None:
    """Refuse attention weights, and what `model.generate` asks for: a key cache, the last tokens' logits."""
    if given.get("output_attentions"):
        raise UnsupportedError("output_attentions", "attention weights are never in memory", "output_attentions=False")
    kept = given.get("logits_to_keep")
    asked = {
        "a key cache": given.get("use_cache") or first_of(given, _CACHES) is not None,
        "logits_to_keep": context.size > 1 and (isinstance(kept, torch.Tensor) or kept),
    }
    if found := " and ".join(name for name, value in asked.items() if value):
        raise UnsupportedError(
            f"{found}, as model.generate asks for",
            "each rank holds, and would keep, a part of the sequence",
            "model.generate within dfa_megatron.huggingface.local_attention(model), on whole sequences of this rank; "
            "use_cache=False and logits_to_keep=0 in other calls",
        )


@outside_graphs
def finish(model: Any, args: Any, output: Any) -> Any:
    """Give every rank the loss of the whole batch; its gradient stays that of this rank's tokens, times the ranks.

    In evaluation it is NaN without a label that counts, as in one process.
    """
    forward = forward_of(model)
    named, indexers = isinstance(output, Mapping), whole_loss(forward)
    forward.context.indexer_loss = indexers
    loss: torch.Tensor | None = None if forward.labelled is None else output.get("loss") if named else output[0]
    if forward.distributed:
        check_reached(model, output, loss)
    if forward.labelled is None or loss is None:
        return None
    total = as_whole(loss, forward.context.group) if forward.context.size > 1 else loss
    if indexers is not None:
        total = total + (indexers * forward.context.indexers).to(total)
    if not model.training:
        total = torch.where(forward.labelled.to(total.device), total, torch.nan)
    if not named:
        return (total, *output[1:])
    output["loss"] = total
    return output


@outside_graphs
def prepare(decoder: Any, args: tuple[Any, ...], kwargs: Arguments) -> ArgsAndKeywords:
    """Give a decoder this rank's part of its inputs."""
    context: LayerContext = getattr(decoder, CONTEXT)
    if forward_of_context(context) is None:
        if not context.local:
            _refuse_direct(context, decoder)
        args, kwargs = begin(decoder, args, kwargs)
    forward = forward_of(decoder)
    if not forward.distributed:
        return args, kwargs
    given = door.cut(decoder, whole.arguments_of(decoder, args, kwargs), forward)
    tokens = tokens_of(given)
    _scale_noise(decoder, tokens, forward)
    given["use_cache"] = False
    if forward.seen and given.get("attention_mask") is None:  # else of the model itself: layers refuse what it hides
        given["attention_mask"] = nothing_hidden(tokens)
    if "position_ids" not in whole.names_of(decoder.__class__):
        del given["position_ids"]
    return (), given


def _refuse_direct(context: LayerContext, decoder: Any) -> None:
    """Refuse a decoder in a `model.forward(...)` of its model, which runs no hook of the model's call."""
    frame: Any = sys._getframe(1)
    while frame := frame.f_back:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else decoder
        held = getattr(caller, "__dict__", {})
        called = caller is decoder or (classifies(caller) and (context.size == 1 or HOOKED in held))
        if held.get(CONTEXT) is context and not called:
            what = f"{type(caller).__name__}.forward of a distributed model, called directly"
            raise UnsupportedError(what, "its hooks cut the batch, and PyTorch runs them in calls", "model(...)")


def _scale_noise(decoder: Any, tokens: torch.Tensor, forward: Forward) -> None:
    """Let NEFTune's noise be that of whole sequences, if a decoder embeds tokens itself.

    transformers' hook of the embeddings divides it by the length of this rank's part.
    """
    embeddings = decoder.get_input_embeddings()
    alpha: float | None = getattr(embeddings, _ALPHA, None)
    if alpha is None or forward.context.size == 1 or tokens.dim() != 2:
        return
    setattr(embeddings, _ALPHA, alpha * math.sqrt(tokens.shape[1] / forward.layout.length))

    def restore(*_: Any) -> None:
        setattr(embeddings, _ALPHA, alpha)
        handle.remove()

    handle = embeddings.register_forward_hook(restore, always_call=True)  # it runs behind transformers' hook
