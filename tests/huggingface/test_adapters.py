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


def test_adapters_that_are_not_known_to_treat_each_token_alone_are_refused() -> None:
    peft = pytest.importorskip("peft")
    causal, one = {"task_type": "CAUSAL_LM"}, {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    virtual = {**causal, "num_virtual_tokens": 2}
    cases = {
        "PROMPT_TUNING": peft.PromptTuningConfig(**virtual),
        "PREFIX_TUNING": peft.PrefixTuningConfig(**virtual),
        "P_TUNING": peft.PromptEncoderConfig(**virtual, encoder_hidden_size=8),
        "MULTITASK_PROMPT_TUNING": peft.MultitaskPromptTuningConfig(**virtual, num_tasks=2),
        "LORA with alora_invocation_tokens": peft.LoraConfig(**one, alora_invocation_tokens=[3, 4]),
        "LORA with velora_config": peft.LoraConfig(**one, velora_config=peft.VeloraConfig()),
        "LOHA with rank_dropout": peft.LoHaConfig(**one, rank_dropout=0.5),
        "OFT with module_dropout": peft.OFTConfig(**one, oft_block_size=8, module_dropout=0.5),
        "LILY": peft.LilyConfig(**one, r=4),
        "POLY": peft.PolyConfig(**one, n_tasks=2, n_skills=2, n_splits=1),
        "PVERA": peft.PveraConfig(**one),
        "ADAPTION_PROMPT": peft.AdaptionPromptConfig(
            **causal, adapter_len=2, adapter_layers=1, target_modules="self_attn"
        ),
    }
    for said, config in cases.items():
        message = f"PEFT's adapter of type {said}:"
        held = torch.nn.Sequential(torch.nn.Sequential(peft.get_peft_model(build("Llama"), config)))
        with pytest.raises(UnsupportedError, match=message):
            dfa_hf.distribute_attention(held)
        if "alora" in said or said == "LILY":  # seen where it comes later, too
            later = peft.get_peft_model(dfa_hf.distribute_attention(build("Llama")), config)
            injected = dfa_hf.distribute_attention(build("Llama"))
            injected.add_adapter(config)
            for each in (later, injected):
                with pytest.raises(UnsupportedError, match=message):
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


def test_adapters_of_each_token_are_exact() -> None:
    pytest.importorskip("peft")
    run_ranks(2, adapters_of_each_token, 3, timeout=150)
