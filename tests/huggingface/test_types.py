"""Ranks that share a sequence have the loss, logits and gradients of one process with the model's own attention.

Named rows, and types of the sweep: popular ones, hybrids, and models of several parts. A fault is noticed.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from tests.fuzz.frameworks.steps import check_each, run
from tests.huggingface import rows
from tests.huggingface.rows import of_type
from tests.support.plants import attention_with

POPULAR = (
    *("cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "glm4", "glm4_moe", "gpt2"),
    *("gpt_neox", "granite", "granitemoe", "lfm2", "minimax_m2", "mixtral", "nemotron_h", "olmo2"),
    *("olmo3", "phi", "phi4_multimodal", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2"),
)
"""The other popular types are in rows.py, and below."""
WHOLE = ("cohere2", "deepseek_v3", "gpt2", "lfm2", "minimax_m2", "nemotron_h", "phi4_multimodal", "qwen3_next")
HYBRIDS = ("falcon_h1", "jamba", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_next")
"""With every recurrence, alone in a layer and beside attention. `make models` has all."""
AGAIN = (("jamba", "remat"), ("qwen3_next", "remat"), ("lfm2", "packed"))
"""What else is compared than a tree. Others are packed and rematerialized on two ranks, in tests/deepspeed."""
IMAGES = ("gemma3", "qwen3_vl")
"""More in `make models`."""


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
@pytest.mark.support("models", "more ranks than heads")
@pytest.mark.support("models", "any length, from a token a rank on")
def test_whole_sequences() -> None:
    """Over two to five ranks."""
    check_each("transformers", rows.whole())


@pytest.mark.support("models", "the same, packed documents")
def test_packed_documents() -> None:
    check_each("transformers", rows.packs())


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
def test_prompt_trees_masks_losses_of_routers_types_of_tokens_and_text_for_models_of_several_parts() -> None:
    check_each("transformers", [*rows.trees(), *rows.masked(), *rows.routed(), *rows.typed()])


@pytest.mark.support("models", "the popular types of the sweep: whole and packed")
def test_popular_types_are_exact_whole_and_packed() -> None:
    """Some of them whole: with experts, states, shared or latent keys, learned positions. `make models` has all."""
    whole = [of_type(kind, "plain", 2) for kind in WHOLE]
    check_each("transformers", whole + [of_type(kind, "packed", 2) for kind in POPULAR])


@pytest.mark.support("models", "hybrids: convolutions, delta rules, state spaces; whole, packed, rematerialized")
def test_states_and_convolutions_follow_paths_over_ranks() -> None:
    check_each("transformers", [of_type(*what, 3) for what in (*((kind, "tree") for kind in HYBRIDS), *AGAIN)])


@pytest.mark.support("models", "images anywhere in the sequence; whole, packed, rematerialized")
def test_images_lie_anywhere_and_towers_get_their_gradients() -> None:
    sections = ("plain", "packed", "remat")
    check_each("transformers", [of_type(kind, section, 3) for kind in IMAGES for section in sections])


def another_scale() -> AbstractContextManager[Any]:
    from dfa_megatron.huggingface import attention_function

    return attention_with(attention_function, softmax_scale=0.9)


def images_are_causal() -> AbstractContextManager[Any]:
    from dfa_megatron.huggingface import seen

    real = seen.two_way_blocks
    return patch.object(seen, "two_way_blocks", lambda lengths, blocks, left: real(lengths, (), left))


def states_stay() -> AbstractContextManager[Any]:
    from dfa_megatron.huggingface import hook_mixers

    return patch.object(hook_mixers, "dist_scan", lambda scan, tokens, **_: scan.run(dict(tokens), None, ()))


def test_a_fault_is_noticed() -> None:
    """Another scale, images that do not see both ways, and states that stay on their ranks."""
    draws = [
        of_type("llama", "plain", 2, plant=another_scale),
        of_type("llama", "packed", 2, plant=another_scale),
        of_type("gemma3", "plain", 2, plant=images_are_causal),
        of_type("olmo_hybrid", "tree", 2, plant=states_stay),
    ]
    assert [outcome.kind for _, outcome in run("transformers", draws, 60.0, math.inf)] == ["wrong"] * len(draws)
