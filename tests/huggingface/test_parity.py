"""A distributed transformers model computes what the same model computes on one rank with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.sharding import shard_sequence, unshard_sequence
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks

_MIXED = ["sliding_attention", "full_attention"]

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-one-kv-head-of-three": ("Llama", {"heads": 3, "kv_heads": 1}),
    "llama-window-left-over-in-the-config": ("Llama", {"sliding_window": 5}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-window-longer-than-a-ranks-part": ("Mistral", {"sliding_window": 15}),
    "mistral-window-longer-than-the-text": ("Mistral", {"sliding_window": 64}),
    "qwen2-window-in-one-layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma2-window-in-one-layer": ("Gemma2", {"attn_logit_softcapping": None, "sliding_window": 5}),
    "gemma2-capped-scores": ("Gemma2", {"attn_logit_softcapping": 3.0, "sliding_window": 5}),
    "gpt-oss-sinks": ("GptOss", {**_EXPERTS, "sliding_window": 64}),
    "gpt-oss-sinks-window-in-one-layer": ("GptOss", {**_EXPERTS, "sliding_window": 5}),
    "gemma3-window-in-one-layer": ("Gemma3Text", {"sliding_window": 5, "layer_types": _MIXED}),
    "qwen2-moe-window-in-one-layer": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": _MIXED,
        },
    ),
    "phimoe-window": ("Phimoe", {**_EXPERTS, "sliding_window": 9, "router_jitter_noise": 0.0}),
    "phi3-window": ("Phi3", {"sliding_window": 9}),
}

NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-shared-keys-window-in-half-of-the-layers": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "layer_types": _MIXED * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 5,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "llama4-chunks-and-temperature": (
        "Llama4Text",
        {
            **_EXPERTS,
            "intermediate_size_mlp": 24,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 7,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
}
"""Of types that older releases of transformers do not have."""


_ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 20}

OF_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-dynamic": ("Llama", {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", **_ROPE}}),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0, 3.0, 1.5, 4.0],
                **_ROPE,
            },
        },
    ),
}
"""Whose RoPE depends on the length of the longest sequence; no rank's part reaches the length at which it changes."""


def compare(rank: int, world_size: int, names: list[str], schedule: str) -> None:
    for seed, name in enumerate(names):
        kind, changes = (MODELS | NEWER | OF_LENGTH)[name]
        batch = text(
            2, 12 * world_size - 1, seed=seed, unlabelled=13 if world_size > 1 else 5
        )  # rank 0 may have no label
        reference = build(kind, seed, **changes)
        want = reference(**batch)
        want.loss.backward()

        model = build(kind, seed, **changes)
        assert dfa_hf.distribute_attention(model, config=TrainingConfig(schedule=schedule)) is model
        for own_loss in (True, False):
            model.zero_grad()
            got = model(**batch) if own_loss else model(input_ids=batch["input_ids"])
            loss = got.loss if own_loss else dfa_hf.causal_lm_loss(got.logits, batch["labels"])
            loss.backward()
            assert_close(got.logits, shard_sequence(want.logits), tolerance=1e-5, name=f"{name} logits")
            assert_loss(loss, want.loss, name)
            assert_gradients(model, gradients(reference), name)


@pytest.mark.support("models", "windows, caps, sinks, experts, RoPE of other lengths: logits, loss, gradients")
@pytest.mark.support("models", lambda params: ["more ranks than heads"] if params["ranks"] == 4 else [])
@pytest.mark.parametrize(
    ("ranks", "names", "schedule"),
    [
        (1, ["llama-yarn", *NEWER, *OF_LENGTH], "auto"),
        (2, [*MODELS], "auto"),
        (3, [*NEWER, *OF_LENGTH], "auto"),
        (3, [name for name in MODELS if "window" not in name], "balanced"),
        (4, ["llama-one-kv-head-of-three"], "balanced_shared"),
    ],
    ids=["1", "2", "3", "3-balanced", "4"],
)
def test_logits_loss_and_gradients_are_those_of_one_rank(ranks: int, names: list[str], schedule: str) -> None:
    run_ranks(ranks, compare, names, schedule, timeout=120)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        ("qwen2-moe-window-in-one-layer", True),
        ("gemma4-shared-keys-window-in-half-of-the-layers", False),
    ],
)
def test_windows_survive_checkpointing(name: str, reentrant: bool) -> None:
    kind, changes = (MODELS | NEWER)[name]
    batch = text(1, 12, seed=4)
    seen = []
    for checkpoint in ("none", "full"):
        again = reentrant and checkpoint == "full"
        model = dfa_hf.distribute_attention(
            build(kind, **changes), config=TrainingConfig(checkpoint=checkpoint), reentrant=again
        )
        out = model(**batch)
        out.loss.backward()
        seen.append((out.logits, gradients(model)))
    reference = build(kind, **changes)(**batch)
    assert_close(seen[1][0], reference.logits, tolerance=1e-5, name=name)
    for key, gradient in seen[0][1].items():
        assert torch.equal(seen[1][1][key], gradient)


def padded(rank: int, world_size: int) -> None:
    """Rows end within the first rank's part, at its end, within the second's, and not at all."""
    length = 8 * world_size
    ends = torch.tensor([5, 8, 13, length])
    batch = text(4, length, seed=3)
    batch["attention_mask"] = (torch.arange(length) < ends[:, None]).long()
    batch["labels"][batch["attention_mask"] == 0] = -100
    reference = build("Qwen2")
    want = reference(**batch)
    want.loss.backward()
    mask = shard_sequence(batch["attention_mask"])
    for given in (batch, {name: x for name, x in batch.items() if name != "attention_mask"}):
        model = dfa_hf.distribute_attention(build("Qwen2"))
        got = model(**given)
        got.loss.backward()
        assert_close(
            got.logits[mask.bool()], shard_sequence(want.logits)[mask.bool()], tolerance=1e-5, name="unpadded logits"
        )
        assert_loss(got.loss, want.loss, "padded")
        assert_gradients(model, gradients(reference), "padded")


def evaluate(rank: int, world_size: int) -> None:
    batch = text(1, 10 * world_size, seed=7)
    model = build("Llama", seed=7).eval()
    with torch.no_grad():
        want = model(**batch).logits
        generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        dfa_hf.distribute_attention(model)
        got = model(**batch)
        assert got.past_key_values is None
        for options in ({}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True}):
            with pytest.raises(UnsupportedError, match=r"as model\.generate asks for.*within .*local_attention"):
                model.generate(batch["input_ids"], max_new_tokens=4, **options)
        assert_close(unshard_sequence(got.logits), want, tolerance=1e-5, name="evaluation")
        with dfa_hf.local_attention(model):
            assert_close(model(**batch).logits, want, tolerance=0.0, name="local attention")
            assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), generated)
        assert_close(unshard_sequence(model(**batch).logits), want, tolerance=1e-5, name="evaluation again")


def padded_and_evaluated(rank: int, world_size: int) -> None:
    padded(rank, world_size)
    evaluate(rank, world_size)


def test_padding_on_the_right_changes_nothing_evaluation_is_distributed_and_generation_local() -> None:
    run_ranks(2, padded_and_evaluated, timeout=120)
