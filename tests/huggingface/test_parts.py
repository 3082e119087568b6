"""Multimodal models embed whole sequences with their images, and are then cut: exact, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from tests.huggingface import conftest
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.huggingface.test_sweep import SECTIONS
from tests.huggingface.test_trees import one_by_one, packed
from tests.support.close import assert_close
from tests.support.models import gradients
from tests.support.workers import preload, run_ranks

KINDS = ("gemma3", "qwen3_vl")
"""More in `make models`."""

if conftest.INSTALLED:
    names = ("gemma3", "qwen3_vl", "siglip")
    preload("tests.huggingface.sweep.attempt", *(f"transformers.models.{name}.modeling_{name}" for name in names))


def states(rank: int, world_size: int, kinds: tuple[str, ...], sections: tuple[str, ...]) -> dict[str, Any]:
    from tests.huggingface.sweep.attempt import attempt

    return {kind: {(v.section, v.state, v.reason) for v in attempt(kind, sections)} for kind in kinds}


@pytest.mark.support("models", "images anywhere in the sequence; whole, packed, rematerialized")
def test_images_lie_anywhere_and_towers_get_their_gradients() -> None:
    sections = (*SECTIONS, "remat")
    for found in run_ranks(3, states, KINDS, sections, timeout=150):
        assert found == {kind: {(section, "exact", "") for section in sections} for kind in KINDS}


def causal_images(rank: int, world_size: int) -> dict[str, Any]:
    from dfa_megatron.huggingface import seen

    real = seen.two_way_blocks
    vars(seen)["two_way_blocks"] = lambda lengths, blocks, left: real(lengths, (), left)
    return states(rank, world_size, ("gemma3",), ("plain",))


def test_images_that_do_not_see_both_ways_are_wrong() -> None:
    for found in run_ranks(2, causal_images, timeout=100):
        assert [state for _, state, _ in found["gemma3"]] == ["wrong"]


def in_trees(rank: int, ranks: int) -> None:
    """A tree whose prompt and second answer have an image; each path alone has one or two."""
    from tests.huggingface.sweep import images

    segments = [[5 * at + own for own in range(length)] for at, length in enumerate((10, 7, 9))]
    segments[0][3:7] = segments[2][2:6] = [images.TOKEN] * images.TOKENS
    rollouts = [segments[0] + answer for answer in segments[1:]]
    for kind in ("gemma3", "gemma4"):
        form = images.WHOLE[kind][1]

        def pixels(ids: torch.Tensor, form: str = form) -> dict[str, torch.Tensor]:
            marks = (ids == images.TOKEN).int()
            here = int(marks.sum()) // images.TOKENS
            both = images._pixels(form, 2, marks)
            return {name: x if name.endswith("type_ids") else x[:here] for name, x in both.items()}

        want, model = images.build(kind), dfa_hf.distribute_attention(images.build(kind))
        loss = one_by_one(want, rollouts, pixels)
        loss.backward()
        batch = packed(rollouts, 26)
        got = model(**(batch | pixels(batch["input_ids"]))).loss
        got.backward()
        for name, parameter in (*want.named_parameters(), *model.named_parameters()):
            if parameter.grad is None or name.endswith("k_proj.bias"):  # unused in a tower, or 0 but for rounding
                parameter.grad = torch.zeros_like(parameter)
        assert_loss(got, loss, kind, 1e-6)
        assert_gradients(model, gradients(want), kind)
        over = batch | pixels(batch["input_ids"]) | {"prompt_tree": ([5, 47], [-1, 0])}
        with pytest.raises(UnsupportedError, match="images whose tokens see each other, under a mask or over several"):
            model(**over)


def test_images_in_a_prompt_tree_see_both_ways() -> None:
    run_ranks(3, in_trees, timeout=100)


def built(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model on this process, distributed, and a batch for it that is not cut."""
    from tests.huggingface.sweep import images
    from tests.huggingface.sweep.attempt import batch_of

    model = images.build(kind)
    batch = images.add_images(model, kind, batch_of(96, 40))
    return dfa_hf.distribute_attention(model), batch


def other_tokens(rank: int, world_size: int) -> None:
    model, batch = built("llava")
    batch = {name: x for name, x in batch.items() if name != "position_ids"}
    cut = {"input_ids": batch["input_ids"].tensor_split(world_size, 1)[rank], "pixel_values": batch["pixel_values"]}
    with pytest.raises(UnsupportedError, match="batches that differ between the ranks"):
        model(**cut)
    alone = {"input_ids": batch["input_ids"]}
    with pytest.raises(UnsupportedError, match="batches that differ between the ranks"):
        model(**alone, **({"pixel_values": batch["pixel_values"]} if rank else {}))
    batch["labels"][:, 30:] = -100
    batch["attention_mask"] = (torch.arange(40) < 30).long().expand(2, 40)
    padded = model(**batch)
    with pytest.raises(UnsupportedError, match="padding that is not on the right"):
        model(input_ids=batch["input_ids"], attention_mask=1 - batch["attention_mask"])
    assert padded.logits.shape[1] == 20


def test_ranks_that_bring_other_tokens_and_padding_on_the_left_are_refused() -> None:
    run_ranks(2, other_tokens, timeout=100)


def test_what_a_multimodal_model_cannot_be_given_is_refused() -> None:
    model, batch = built("qwen3_vl")
    del batch["labels"]
    places = torch.arange(40)[None]
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(1, 40\) for inputs_embeds"):
        model(**batch, position_ids=places)
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(2, 40\) for inputs_embeds"):
        model(**batch, prompt_tree=([30, 10], [-1, 0]))
    with pytest.raises(UnsupportedError, match="inputs_embeds, or no input_ids"):
        model(inputs_embeds=torch.zeros(1, 40, 32).double())
    with pytest.raises(UnsupportedError, match="cross_attention_states for the decoder"):
        model(**batch, cross_attention_states=torch.zeros(1, 3, 32))
    with dfa_hf.local_attention(model):
        want = model(**batch, use_cache=False).logits
    assert_close(model(**batch).logits, want, tolerance=1e-5, name="logits")
    assert model.config.vision_config._attn_implementation == "eager"
