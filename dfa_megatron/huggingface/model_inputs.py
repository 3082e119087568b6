"""Check and complete the inputs of a distributed model: positions in the whole sequence or document, shifted labels.

These are forward pre-hooks. They do nothing while the model has another attention.
"""

from __future__ import annotations

import functools
import inspect
from itertools import pairwise
from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.attention_function import NAME, nothing_hidden
from dfa_megatron.huggingface.check_model import refuse_router_loss
from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext, run_of
from dfa_megatron.huggingface.padding import check_right, check_unlabelled
from dfa_megatron.huggingface.parts.image_masks import IMAGES, with_images
from dfa_megatron.huggingface.parts.text_part import is_distributed, switch_attention
from dfa_megatron.huggingface.parts.whole_inputs import check_by_name, cut
from dfa_megatron.huggingface.parts.wrappers import check_adapters
from dfa_megatron.huggingface.positions import batch_number, tree_inputs
from dfa_megatron.huggingface.positions import document_starts as packed
from dfa_megatron.huggingface.positions import prompt_trees as trees
from dfa_megatron.huggingface.positions.embedded_positions import after_padding, padding_of, places
from dfa_megatron.huggingface.trainers.embedding_noise import scale_noise
from dfa_megatron.huggingface.windows import WindowMask
from dfa_megatron.sharding import local_positions, shard_sequence

_LOSS = "dfa_megatron.huggingface.shard_batch, or no labels and causal_lm_loss on the logits"

_OTHER_SENSES = ("pixel_values", "pixel_values_videos", "input_features")
"""Endings of the names of arguments for images and sound."""


def prepare(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the documents, and check by the positions that the tokens are this rank's part of the sequences.

    Only a single rank may omit the positions. With several ranks they are required: code that omits them does not
    slice sequences, and its whole batch would be treated as a part.

    Raises:
        UnsupportedError: no or other positions (of a whole sequence, or that begin nowhere), padding that is not on the
            right, a cache, images or sound, or masks of another model.
    """
    context: LayerContext = getattr(module, CONTEXT)
    if not context.current.running:  # a decoder that is called alone
        follow_mode(module, args, kwargs)
        context.current.running = False
    if module.config._attn_implementation != NAME:
        return args, _of_local(kwargs, context)
    told, context.current.told = context.current.told, {}
    kwargs = kwargs | told if context.parts else told | kwargs  # a model of several parts fills in positions
    images = kwargs.pop(IMAGES, None)
    told_tree = kwargs.pop(trees.KEY, None)
    _check_arguments(args, kwargs, context)
    number = kwargs.pop(batch_number.KEY, None)
    if context.parts:
        kwargs = cut(module, args, kwargs, context)
    tokens = next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if x is not None)
    given = _places(module, kwargs, context)
    documents: packed.Documents | trees.Tree | None
    if told_tree is None:
        documents, positions = _documents(kwargs, given, tokens, context, number)
    else:
        documents, positions = tree_inputs.segments(told_tree, module, kwargs, tokens)
        if context.options.verify != "off":
            batch_number.check_same(number, context.group, tokens.device)
        if given is not None and context.options.verify != "off" and not _equal(given, positions):
            _refuse_positions(given, context, tokens.shape[1])
    kept = {name: value for name, value in kwargs.items() if name not in packed.FLASH_KEYS}
    kept |= {"position_ids": _embedded(module, kwargs, tokens, documents, positions), "use_cache": False}
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        check_right(mask, context.group)
        kept["attention_mask"] = None
    _note(context, documents, tokens)
    scale_noise(module, tokens, context)
    kept["position_ids"] = context.current.positions = _within_longest(module, kept["position_ids"])
    parameters = _parameters(module.__class__)
    if not any(parameter.name == "position_ids" for parameter in parameters):
        del kept["position_ids"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        kept[packed.KEYWORD] = documents  # the decoder passes every keyword to its layers
    if images is not None:
        assert isinstance(mask, dict)
        kept["attention_mask"] = with_images(mask, images)
    elif (documents is not None or context.current.added) and not isinstance(mask, dict):
        kept["attention_mask"] = nothing_hidden(tokens.shape[0], tokens.shape[1], tokens.device)
    return args, kept


def _places(module: Any, kwargs: dict[str, Any], context: LayerContext) -> torch.Tensor | None:
    """Return the places of this rank's tokens; only a single rank may have none."""
    given = places(module, kwargs)
    if given is None and context.size > 1:
        raise UnsupportedError(
            f"a batch without position_ids on {context.size} ranks",
            "each rank takes its part of a sequence, and the batch does not show that it is a part",
            "dfa_megatron.huggingface.shard_batch, which brings them",
        )
    return given


def _of_local(kwargs: dict[str, Any], context: LayerContext) -> dict[str, Any]:
    """Return the arguments of a forward whose attention is local, on one rank also of a part, which is whole there."""
    tree_inputs.taken(kwargs, context, distributed=False)
    context.current.longest, context.current.positions = 0, None
    return {name: value for name, value in kwargs.items() if name != batch_number.KEY}


def _note(context: LayerContext, documents: packed.Documents | trees.Tree | None, tokens: torch.Tensor) -> None:
    """Note the facts of this forward for the modules that do not receive them."""
    current = context.current
    current.documents = documents
    current.packed = current.packed or documents is not None
    if isinstance(documents, trees.Tree):
        current.longest = int(documents.positions()[0].max()) + 1
        return
    ends = documents or ((0, tokens.shape[1] * context.size),)
    real = [(*offsets[:-1], offsets[-1] - current.added) for offsets in ends]
    current.longest = max(hi - lo for offsets in real for lo, hi in pairwise(offsets))


def _within_longest(module: Any, positions: torch.Tensor) -> torch.Tensor:
    """Limit positions to those of the longest document. Nothing attends to added tokens, but a table may end there."""
    current, padding = getattr(module, CONTEXT).current, padding_of(module)
    if not current.added or positions.dim() == 3:
        return positions
    return positions.clamp(max=current.longest + (-1 if padding is None else padding))


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], context: LayerContext) -> None:
    """Refuse arguments that need a whole sequence, and arguments that these checks cannot find."""
    check_by_name(args[1:])
    if kwargs.get("use_cache") or _key_cache(kwargs) is not None:
        raise UnsupportedError(
            "a key cache",
            "ranks hold parts of the sequence",
            "use_cache=False, or generation within dfa_megatron.huggingface.local_attention(model)",
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions", "attention weights are never in memory", "output_attentions=False")
    masks = kwargs.get("attention_mask")
    if isinstance(masks, dict) and not (context.parts and all(map(_plain, masks.values()))):
        raise UnsupportedError(
            "masks made by the model around this one",
            "they may let tokens see others in ways of their own",
            "distribute_attention of the whole model, if its masks are causal but for the images of Gemma 3 and 4",
        )
    others = ", ".join(name for name in kwargs if name.endswith(_OTHER_SENSES) and kwargs[name] is not None)
    if others and context.size > 1:
        raise UnsupportedError(
            f"{others} on {context.size} ranks",
            "images and sound belong to the whole sequence, and this rank holds a part of its tokens",
            "distribute_attention of the whole model, which embeds whole sequences and then cuts them",
        )
    if not context.parts and batch_number.KEY in kwargs and not batch_number.is_cut(kwargs[batch_number.KEY]):
        raise UnsupportedError(
            "a batch with images or sound for a model of text",
            "shard_batch leaves the tokens of such a batch whole, for a model of several parts",
            "a batch of text alone, or distribute_attention of the whole model of several parts",
        )


def _key_cache(given: dict[str, Any]) -> Any:
    """Return the cache of keys and values that a call brings, under its name before and since transformers 5.24."""
    return next((given[name] for name in ("past_key_values", "cache") if given.get(name) is not None), None)


def _plain(mask: Any) -> bool:
    """Return whether a mask is causal, with a window or without."""
    return mask is None or isinstance(mask, WindowMask)


def _embedded(
    module: Any,
    kwargs: dict[str, Any],
    tokens: torch.Tensor,
    documents: packed.Documents | trees.Tree | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return the positions that the model embeds, from the tokens' positions in their sequence or document."""
    given: torch.Tensor | None = kwargs.get("position_ids")
    if given is not None and given.dim() == 3:
        return given
    padding = padding_of(module)
    if padding is None:
        return positions
    if tokens.dim() > 2:  # embeddings: none is known to be padding, as in the model itself
        return positions + padding + 1
    assert not isinstance(documents, trees.Tree)  # refused in `tree_inputs.segments`
    context: LayerContext = getattr(module, CONTEXT)
    return after_padding(tokens, documents, padding, context.group)


def _documents(
    kwargs: dict[str, Any],
    given: torch.Tensor | None,
    tokens: torch.Tensor,
    context: LayerContext,
    number: torch.Tensor | None,
) -> tuple[packed.Documents | None, torch.Tensor]:
    """Return the documents of every row, None if each row is one, and the positions of this rank's tokens."""
    batch, local = tokens.shape[:2]
    device = tokens.device if given is None else given.device
    plain = local_positions(local * context.size, group=context.group, device=device)[None]
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("cu_seq_lens_k") is not None:
        found = packed.of_offsets(kwargs, batch, local * context.size)
        if not packed.single(found):
            plain = shard_sequence(packed.positions_of(found, device), group=context.group)
        if context.options.verify != "off":
            batch_number.check_same(number, context.group, device)
        if given is not None and context.options.verify != "off" and not _equal(given, plain):
            _refuse_positions(given, context, local)
    elif given is None or context.options.verify == "off":
        return None, plain if given is None else given
    else:
        known = packed.of_ranks(given, plain, local, context.group, number)
        if known is None:
            _refuse_positions(given, context, local)
        found = known * batch if len(known) == 1 else known
    return (None if packed.single(found) else found), plain if given is None else given


def follow_mode(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Under accelerate, switch to distributed attention in training and to the model's own in evaluation.

    Raises:
        UnsupportedError: a part of a sequence in evaluation.
    """
    context: LayerContext = getattr(module, CONTEXT)
    context.current.running = True
    check_adapters(module)  # which may be added later than attention is distributed
    if not context.accelerate or context.current.held:
        return
    wanted = NAME if module.training else context.before
    switch_attention(module, wanted)
    if wanted != NAME and context.size > 1 and context.options.verify != "off":
        _check_whole(arguments_of(module, args, kwargs))


def _check_whole(given: dict[str, Any]) -> None:
    """Refuse a batch in which a sequence begins at a later position: the first rank's part of one goes unseen.

    The ranks do not communicate: each evaluates its own sequences, possibly another number of them.
    """
    positions: torch.Tensor | None = given.get("position_ids")
    if positions is None or not positions.numel() or _key_cache(given) is not None:
        return
    later = positions[..., 0] > 0
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:  # generation gives padding on the left any position
        later = later & mask[:, 0].bool()
    if bool(later.any()):
        ends = _ends(positions)
        raise UnsupportedError(
            f"position_ids {ends} in evaluation",
            "attention is local there under accelerate, and this is a part of a sequence that was cut over the ranks, "
            "as by loaders that are prepared together with the model",
            "the evaluation loader prepared alone, accelerator.prepare(loader), which leaves sequences whole; or "
            "model.train() within torch.no_grad(), for a model without dropout",
        )


def arguments_of(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, positional ones too, by their names in the forward of the module's class."""
    names = [parameter.name for parameter in _parameters(module.__class__)[1:]]  # without self
    return dict(zip(names, args, strict=False)) | kwargs


@functools.cache
def _parameters(model: Any) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(model.forward).parameters.values())


def end_forward(module: Any, args: tuple[Any, ...], output: Any) -> None:
    """Note that a forward ended, or failed."""
    context: LayerContext = getattr(module, CONTEXT)
    context.current.running = False


def check_told(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to run an attention layer again after attention was switched, where nothing tells what it was.

    Raises:
        UnsupportedError: its checkpoint function did not tell.
    """
    context: LayerContext = getattr(module, CONTEXT)
    present = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if context.current.switched and not (packed.KEYWORD in kwargs and present == NAME):
        run_of(module)


def check_loss(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the ways in which a model's own loss would be wrong on a part of a sequence.

    Raises:
        UnsupportedError: a loss of the router, labels that the model would shift by itself, a mean over the tokens of
            this rank, or labels of padded tokens.
    """
    context: LayerContext = getattr(module, CONTEXT)
    if not is_distributed(module):
        return
    given = arguments_of(module, args, kwargs)
    context.current.told = {
        name: given[name] for name in ("position_ids", *packed.FLASH_KEYS) if given.get(name) is not None
    }
    asked = given.get("output_router_logits")
    if getattr(module.config, "output_router_logits", False) if asked is None else asked:
        refuse_router_loss("a call")
    if given.get("labels") is None:
        return
    if (mask := given.get("attention_mask")) is not None and mask.dim() == 2:
        shifted = given.get("shift_labels")
        if context.parts:
            mask = shard_sequence(mask, group=context.group)
        check_unlabelled(mask, given["labels"] if shifted is None else shifted)
    if context.size == 1:
        return
    if not computes_loss(module):
        raise UnsupportedError(
            f"labels for a model of type {type(module).__name__}",
            "its loss is a mean over the tokens of this rank, not of all",
            "no labels, and causal_lm_loss on its logits",
        )
    if given.get("shift_labels") is None:
        raise UnsupportedError(
            "labels without shift_labels",
            "the model would shift them and lose a token at every boundary between ranks",
            _LOSS,
        )
    if given.get("num_items_in_batch") is None and not context.accelerate:
        raise UnsupportedError(
            "labels without num_items_in_batch",
            "the model would take the mean over the tokens of this rank, not of all",
            _LOSS,
        )


def computes_loss(model: Any) -> bool:
    """Return whether a model computes its loss by transformers' loss function, which takes the number of labels."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def _equal(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return given.dim() == 2 and given.shape[1] == expected.shape[1] and bool((given == expected).all())


def _refuse_positions(given: torch.Tensor, context: LayerContext, local: int) -> NoReturn:
    first, shape, ends = int(local_positions(local * context.size, group=context.group)[0]), given.shape, _ends(given)
    last = first + local - 1
    raise UnsupportedError(
        f"position_ids {ends} of shape {tuple(shape)}",
        f"this rank holds the tokens {first} to {last} of each sequence, and every sequence, or every document in it, "
        "must begin at position 0 and go up by 1, across the ranks",
        "the position_ids of dfa_megatron.huggingface.shard_batch, or of dfa_megatron.local_positions",
    )


def _ends(positions: torch.Tensor) -> str:
    flat = positions.flatten()
    return f"from {int(flat[0])} to {int(flat[-1])}" if flat.numel() else "without a token"
