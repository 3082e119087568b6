"""Modules around a model that compute from whole sequences are refused by name; those that hand tokens on are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.compared import assert_gradients
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = build("Llama")

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return self.lm(input_ids=input_ids, **others)


class Blind(HandsOn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.lm(*args, **kwargs).logits


class LooksForToken(HandsOn):
    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        found = (input_ids == 3).any(1)
        return self.lm(input_ids=input_ids, **others).logits * found[:, None, None]


class Prefixes(HandsOn):
    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return self.lm(inputs_embeds=self.lm.get_input_embeddings()(input_ids), **others)


class FromKeywords(HandsOn):
    def forward(self, **kwargs: Any) -> Any:
        self.seen = kwargs["input_ids"].float().mean()
        return self.lm(**kwargs)


class Deep(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("wrapper", [LooksForToken, Prefixes, FromKeywords])
@pytest.mark.parametrize("deep", [False, True])
def test_a_wrapper_that_reads_tokens_is_refused(wrapper: type[HandsOn], deep: bool) -> None:
    model = wrapper()
    with pytest.raises(UnsupportedError, match=f"a {wrapper.__name__} around a transformers model"):
        dfa_hf.distribute_attention(Deep(model) if deep else model)
    assert model.lm.config._attn_implementation == "eager"
    dfa_hf.distribute_attention(model.lm)  # who knows better says so


@pytest.mark.parametrize("wrapper", [HandsOn, Blind])
def test_a_wrapper_that_hands_tokens_on_is_not(wrapper: type[HandsOn]) -> None:
    dfa_hf.distribute_attention(Deep(wrapper()))
    dfa_hf.distribute_attention(nn.Sequential(build("Llama")))


def _adapters() -> dict[str, tuple[Any, str]]:
    peft = pytest.importorskip("peft")
    causal = {"task_type": "CAUSAL_LM"}
    virtual = {**causal, "num_virtual_tokens": 2}
    return {
        "prompt": (peft.PromptTuningConfig(**virtual), "PROMPT_TUNING"),
        "prefix": (peft.PrefixTuningConfig(**virtual), "PREFIX_TUNING"),
        "p": (peft.PromptEncoderConfig(**virtual, encoder_hidden_size=8), "P_TUNING"),
        "multitask": (peft.MultitaskPromptTuningConfig(**virtual, num_tasks=2), "MULTITASK_PROMPT_TUNING"),
        "activated": (
            peft.LoraConfig(**causal, target_modules=["q_proj"], alora_invocation_tokens=[3, 4]),
            "activated LoRA",
        ),
        "in attention": (
            peft.AdaptionPromptConfig(**causal, adapter_len=2, adapter_layers=1, target_modules="self_attn"),
            "ADAPTION_PROMPT",
        ),
    }


@pytest.mark.parametrize("name", ["prompt", "prefix", "p", "multitask", "activated", "in attention"])
def test_adapters_over_tokens_are_refused(name: str) -> None:
    import peft

    config, said = _adapters()[name]
    with pytest.raises(UnsupportedError, match=f"PEFT's adapter of type {said}"):
        dfa_hf.distribute_attention(peft.get_peft_model(build("Llama"), config))
    if name == "activated":  # seen where it comes later, too
        model = dfa_hf.distribute_attention(build("Llama"))
        later = peft.get_peft_model(model, config)
        with pytest.raises(UnsupportedError, match=f"PEFT's adapter of type {said}"):
            later(input_ids=text(1, 8, seed=0)["input_ids"])


def adapters_of_each_token(rank: int, world_size: int) -> None:
    import peft

    whole = text(1, 12, seed=1, unlabelled=7)
    for config in (
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ):
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(peft.get_peft_model(build("Llama"), config).double())
        want, model = models
        want(**whole).loss.backward()
        dfa_hf.distribute_attention(model)
        model(**dfa_hf.shard_batch(whole)).loss.backward()
        assert_gradients(model, gradients(want), type(config).__name__, 1e-6)


def test_adapters_of_each_token_are_exact() -> None:
    pytest.importorskip("peft")
    run_ranks(2, adapters_of_each_token, timeout=150)
