"""Let `model.generate` of a distributed model generate over its group."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checks.call_checks import CACHES
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext, forward_of_context
from dfa_megatron.huggingface.implementation import is_distributed
from dfa_megatron.huggingface.recurrent.stand_ins import FORWARDS

_LOCAL = "model.generate within dfa_megatron.huggingface.local_attention(model), on whole sequences of this rank"

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "penalty_alpha": (None, 0),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), (None, False)),
    **dict.fromkeys(("cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens"), (None,)),
    **dict.fromkeys(("assistant_model", *CACHES, "inputs_embeds", "position_ids"), (None,)),
    **dict.fromkeys(("custom_generate", "dola_layers"), (None,)),
}
"""Options of `generate` that are refused, but for these values."""


def wrap_generate(model: Any) -> None:
    """Have this model's `generate` go over its group while its attention is distributed; may be called again."""
    if hasattr(model, "generate"):
        model.generate = functools.partial(generate, model)


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' `generate` on every rank of the group, with prompts that are the same; returns the same ids.

    The cache stays sharded. Greedy search and sampling; when sampling, the ranks' random states must be the same.

    Raises:
        UnsupportedError: an option, or a model, that is not for a cache that is spread over ranks.
        DisagreementError: the ranks have other prompts, options or random states.
    """
    context: LayerContext = getattr(model, CONTEXT)
    theirs = type(model).generate
    if context.local or context.accelerate or not is_distributed(model):
        return theirs(model, *args, **kwargs)
    _check(model, context, kwargs)
    try:
        from dfa_megatron.huggingface.generation.steps import agree_on_tokens, make_cache
    except ImportError as error:
        raise UnsupportedError(
            "generation over ranks with this transformers", str(error), "5.17 to 5.24 of it"
        ) from error
    cache = make_cache(context, model.config.get_text_config())
    ids = theirs(model, *args, **kwargs | {"past_key_values": cache})
    agree_on_tokens(context, ids if isinstance(ids, torch.Tensor) else ids.sequences, "generation")
    return ids


def _check(model: Any, context: LayerContext, kwargs: dict[str, Any]) -> None:
    """Refuse what would need a whole cache on one rank, or would differ between the ranks."""
    configs = (kwargs.get("generation_config"), model.generation_config)
    for name, neutral in _NEUTRAL.items():
        asked = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        value = next((x for x in asked if x is not None), None)
        if value not in neutral:
            raise UnsupportedError(f"{name}={value!r} in a generation over ranks", "it is greedy, or samples", _LOCAL)
    owns = [type(module).__name__ for module in model.modules() if type(module).__name__ in FORWARDS]
    if owns or not inspect.signature(type(model).forward).parameters.keys() & set(CACHES):
        raise UnsupportedError(
            f"generation of {type(model).__name__} over ranks", "its cache is one of its own, of states alone", _LOCAL
        )
    if model.training and any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules()):
        raise UnsupportedError(
            "generation with dropout in training mode",
            "it would differ between the ranks",
            "model.eval(), or TRL's disable_dropout=True",
        )
    if context.multimodal:
        raise UnsupportedError("generation with a multimodal model over ranks", "its prompts have images", _LOCAL)


def end_prefill(decoder: Any, args: tuple[Any, ...], output: Any) -> None:
    """Give every rank the output of the sequence's last token as that of its own last token, as a forward hook."""
    forward = forward_of_context(getattr(decoder, CONTEXT))
    if forward is None or forward.cache is None or not forward.distributed:
        return
    hidden = output[0]
    hidden[:, -1] = forward.cache.progress.gather(hidden[:, -1].contiguous())[-1]
