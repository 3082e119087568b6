"""Models that embed other positions than the places of their tokens get their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.sharding import unshard_sequence
from tests.support.close import assert_close
from tests.support.models import VOCABULARY, build, text
from tests.support.workers import run_ranks

_SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}

LIMIT = 10
"""Tokens up to which the tables and frequencies of these models reach."""
_ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": LIMIT}
_LONGROPE = _ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0]}
REACH: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "Phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": LIMIT, "pad_token_id": 0},
    "GPTBigCode": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}


def uneven(rank: int, world_size: int) -> None:
    """Whole batches whose length the ranks do not divide."""
    for kind, changes in REACH.items():
        reach = {"max_position_embeddings": 64 if kind == "Phi3" else LIMIT}
        reference, model = (build(kind, **changes, **reach).double() for _ in range(2))
        dfa_hf.distribute_attention(model)
        for length, starts in ((LIMIT, ()), (LIMIT - 1, ()), (14, (4,))):  # the last document is the longest
            batch = text(2, length, seed=length)
            if starts:
                batch |= {"position_ids": torch.cat([torch.arange(4), torch.arange(length - 4)]).expand(2, -1)}
            parts = [{name: x[:, lo:hi] for name, x in batch.items()} for lo, hi in pairwise((0, *starts, length))]
            outputs = [reference(**part) for part in parts]
            counts = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
            total = sum(output.loss * count for output, count in zip(outputs, counts, strict=True))
            if starts:  # the first token of a document is the label of the one before
                batch["labels"] = batch["labels"].clone()
                batch["labels"][:, starts[0]] = -100
            got, want = model(**batch).loss, total / sum(counts)
            gradients = torch.autograd.grad(got, list(model.parameters()), allow_unused=True)
            wanted = torch.autograd.grad(want, list(reference.parameters()), allow_unused=True)
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-6, atol=1e-6)
            for mine, theirs in zip(gradients, wanted, strict=True):
                if theirs is not None and theirs.abs().max() > 1e-6:  # softmax leaves a bias of keys only rounding
                    whole = torch.zeros_like(theirs) if mine is None else mine.clone()
                    torch.distributed.all_reduce(whole)
                    assert_close(whole / world_size, theirs, tolerance=1e-5, name=f"{kind}, {length}")
            model.eval()
            logits = torch.cat([output.logits for output in outputs], 1)
            found = unshard_sequence(model(**batch).logits)
            assert_close(found, logits, tolerance=1e-5, name=f"{kind}, {length}, logits")
            model.train()


def test_tables_and_frequencies_reach_as_far_as_on_one_rank_at_lengths_that_ranks_do_not_divide() -> None:
    run_ranks(3, uneven, timeout=120)


def qwen() -> Any:
    """A whole Qwen2-VL, and what it is given: text around an image of four tokens."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    torch.manual_seed(0)
    axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config={**_SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "rope_parameters": axes},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1},
        image_token_id=60,
        video_token_id=59,
        vision_start_token_id=58,
        attn_implementation="eager",
    )
    model = Qwen2VLModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = text(1, 16, seed=0)["input_ids"] % 58
    ids[0, 4], ids[0, 5:9] = 58, 60
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 60).int(),
    }
    return model.train(), ids, image


def test_a_whole_model_that_gives_its_tower_plain_positions_for_an_image_is_refused() -> None:
    whole, ids, image = qwen()
    want = whole(input_ids=ids, **image).last_hidden_state
    dfa_hf.distribute_attention(whole.language_model, unlisted=True)
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(1, 16\) for inputs_embeds"):
        whole(input_ids=ids, **image, position_ids=torch.arange(16)[None])
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(3, 1, 16\).*a token's place"):
        whole(input_ids=ids, **image)
    with dfa_hf.local_attention(whole.language_model):
        assert torch.equal(whole(input_ids=ids, **image).last_hidden_state, want)
    text_alone = whole.language_model(input_ids=ids, position_ids=torch.arange(16)[None]).last_hidden_state
    with dfa_hf.local_attention(whole.language_model):
        assert_close(text_alone, whole(input_ids=ids).last_hidden_state, tolerance=1e-5, name="text")


def test_masks_that_a_whole_model_makes_for_its_tower_are_refused() -> None:
    from transformers import Gemma3Config, Gemma3Model

    sizes = {**_SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    vision = {**_SIZES, "image_size": 8, "patch_size": 4}
    model = Gemma3Model(Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4)).eval()
    dfa_hf.distribute_attention(model.language_model)
    with pytest.raises(UnsupportedError, match="masks made by the model around this one"):
        model(input_ids=text(1, 8, seed=0)["input_ids"])
