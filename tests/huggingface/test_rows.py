"""Ranks that share a sequence have the loss, logits and gradients of one process with the model's own attention."""

from __future__ import annotations

import pytest

from tests.fuzz.frameworks.steps import check_each
from tests.huggingface import rows


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
