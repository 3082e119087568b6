"""Ranks that share a sequence have the loss, logits and gradients of one process with the model's own attention."""

from __future__ import annotations

import pytest

from tests.fuzz.frameworks.steps import check_each
from tests.huggingface import rows


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
@pytest.mark.support("models", lambda params: ["more ranks than heads"] if params["ranks"] == 4 else [])
@pytest.mark.support("models", "any length, from a token a rank on")
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_whole_sequences(ranks: int) -> None:
    check_each("transformers", [draw for draw in rows.whole() if draw.ranks == ranks])


@pytest.mark.support("models", "the same, packed documents")
def test_packed_documents() -> None:
    check_each("transformers", rows.packs())


def test_prompt_trees() -> None:
    check_each("transformers", rows.trees())


def test_any_mask() -> None:
    check_each("transformers", rows.masked())


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
def test_losses_of_routers() -> None:
    check_each("transformers", rows.routed())


def test_types_of_tokens_and_text_for_models_of_several_parts() -> None:
    check_each("transformers", rows.typed())
