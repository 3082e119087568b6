"""Adapters that treat each token alone are exact; others are refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.check_model import _EACH_TOKEN
from tests.huggingface.compared import assert_gradients
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks


def _adapters() -> dict[str, tuple[Any, str]]:
    peft = pytest.importorskip("peft")
    causal = {"task_type": "CAUSAL_LM"}
    virtual, some = {**causal, "num_virtual_tokens": 2}, {**causal, "target_modules": ["q_proj"]}
    return {
        "prompt": (peft.PromptTuningConfig(**virtual), "PROMPT_TUNING"),
        "prefix": (peft.PrefixTuningConfig(**virtual), "PREFIX_TUNING"),
        "p": (peft.PromptEncoderConfig(**virtual, encoder_hidden_size=8), "P_TUNING"),
        "multitask": (peft.MultitaskPromptTuningConfig(**virtual, num_tasks=2), "MULTITASK_PROMPT_TUNING"),
        "activated": (peft.LoraConfig(**some, alora_invocation_tokens=[3, 4]), "LORA with alora_invocation_tokens"),
        "velora": (peft.LoraConfig(**some, velora_config=peft.VeloraConfig()), "LORA with velora_config"),
        "random weights": (peft.LoHaConfig(**some, rank_dropout=0.5), "LOHA with rank_dropout"),
        "random modules": (peft.OFTConfig(**some, oft_block_size=8, module_dropout=0.5), "OFT with module_dropout"),
        "router": (peft.LilyConfig(**some, r=4), "LILY"),
        "tasks": (peft.PolyConfig(**some, n_tasks=2, n_skills=2, n_splits=1), "POLY"),
        "noise": (peft.PveraConfig(**some), "PVERA"),
        "in attention": (
            peft.AdaptionPromptConfig(**causal, adapter_len=2, adapter_layers=1, target_modules="self_attn"),
            "ADAPTION_PROMPT",
        ),
    }


REFUSED = (
    *("prompt", "prefix", "p", "multitask", "activated", "velora", "random weights", "random modules"),
    *("router", "tasks", "noise", "in attention"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_are_not_known_to_treat_each_token_alone_are_refused(name: str) -> None:
    import peft

    config, said = _adapters()[name]
    assert tuple(_adapters()) == REFUSED
    with pytest.raises(UnsupportedError, match=f"PEFT's adapter of type {said}:"):
        dfa_hf.distribute_attention(
            torch.nn.Sequential(torch.nn.Sequential(peft.get_peft_model(build("Llama"), config)))
        )
    if name in ("activated", "router"):  # seen where it comes later, too
        model = dfa_hf.distribute_attention(build("Llama"))
        later = peft.get_peft_model(model, config)
        injected = dfa_hf.distribute_attention(build("Llama"))
        injected.add_adapter(config)
        for each in (later, injected):
            with pytest.raises(UnsupportedError, match=f"PEFT's adapter of type {said}:"):
                each(input_ids=text(1, 8, seed=0)["input_ids"])


SMALL: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10}, "BOFT": {"boft_block_size": 8, "boft_n_butterfly_factor": 1},
    "C3A": {"block_size": 8}, "FOURIERFT": {"n_frequency": 20}, "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": ["down_proj"]}, "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    **{kind: {"r": 4} for kind in ("MISS", "RANDLORA")}, "OFT": {"oft_block_size": 8}, "PSOFT": {"r": 8},
    "ROAD": {"variant": "road_2", "group_size": 8}, "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [*range(40)]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16, "topk": 2}, "WAVEFT": {"n_frequency": 24},
}  # fmt: skip
"""Options that adapters of a small model need, by type."""


def adapted(kind: str, ways: random.Random) -> Any:
    """A model with an adapter of random weights, in one of the ways that it may be added."""
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as KINDS

    more = {"use_dora": True} if kind == "LORA" and ways.random() < 0.5 else {}
    config = KINDS[kind](**{"target_modules": ["q_proj", "down_proj"]} | SMALL.get(kind, {}) | more)
    torch.manual_seed(1)
    model = build("Llama")
    if kind in ("IA3", "LOHA", "LORA", "OFT") and ways.random() < 0.5:
        model.add_adapter(config)  # which others refuse
    else:
        model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model if kind == "C3A" else model.double()  # whose products are in float32


def adapters_of_each_token(rank: int, world_size: int, seed: int) -> None:
    draw = random.Random(seed)
    for kind in draw.sample(sorted(_EACH_TOKEN), 10):
        whole = text(1, draw.randrange(9, 16), seed=seed, unlabelled=draw.randrange(8))
        way = draw.random()
        want, model = (adapted(kind, random.Random(way)) for _ in range(2))
        want(**whole).loss.backward()
        dfa_hf.distribute_attention(model)
        model(**whole).loss.backward()
        assert_gradients(model, gradients(want), kind, 1e-4 if kind == "C3A" else 1e-5)


@pytest.mark.parametrize("seed", [3])
def test_adapters_of_each_token_are_exact(seed: int) -> None:
    pytest.importorskip("peft")
    run_ranks(2, adapters_of_each_token, seed, timeout=150)
