"""A model's type is no proof for code that is not transformers' own: classes are refused, what is patched is named.

Adapters that treat each token alone are exact; others are refused by name.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import check_model
from dfa_megatron.huggingface.check_model import _EACH_TOKEN
from tests.huggingface.one_process import assert_gradients
from tests.support.models import build, gradients, text
from tests.support.workers import over_ranks


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Each token with a part of the one before it."""
    return x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Shift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shifted(x)


def _derived(module: Any) -> type:
    """The same class but for a forward of its own, as in modified copies of a modelling file."""
    base = type(module)

    class Mixing(base):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    return Mixing


def derived(path: str) -> Callable[[Any], None]:
    """Give a part of a model a class with a forward of its own."""

    def change(model: Any) -> None:
        part = model.get_submodule(path)
        part.__class__ = _derived(part)

    return change


def remote_code(model: Any) -> None:
    model.model.norm.__class__ = type("Mixing", (type(model.model.norm),), {"__module__": "transformers_modules.x.y"})


def inside_a_container(model: Any) -> None:
    model.model.layers[1].mlp = nn.Sequential(Shift(), model.model.layers[1].mlp)


def forward_of_an_instance(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(shifted(x))


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda module, args: (shifted(args[0]), *args[1:]))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[Any], list[str]]:
    check_model._warn.cache_clear()

    def of(model: Any, unlisted: bool = False, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dfa_megatron"):
            dfa_hf.distribute_attention(model, config=TrainingConfig(**options), unlisted=unlisted)
        return [record.getMessage() for record in caplog.records]

    return of


CLASSES: list[tuple[Callable[[Any], None], str]] = [
    *((derived(path), "Mixing") for path in ("model.layers.1.mlp", "model.layers.0.self_attn", "model.layers.0", "")),
    (remote_code, "transformers_modules.x.y.Mixing"),
    (inside_a_container, "Shift"),
]


@pytest.mark.parametrize(("change", "name"), CLASSES)
def test_a_class_that_is_not_of_transformers_is_refused_but_for_one_word(
    change: Callable[[Any], None], name: str, said: Callable[..., list[str]]
) -> None:
    model = build("Llama")
    change(model)
    with pytest.raises(UnsupportedError, match=rf"a llama model with modules of .*{name}.*unlisted=True"):
        dfa_hf.distribute_attention(model)
    (message,) = said(model, unlisted=True)
    assert name in message
    assert "prove(model)" in message


@pytest.mark.parametrize("change", [forward_of_an_instance, hook])
@pytest.mark.parametrize("options", [{}, {"loss_tile": 4, "checkpoint": "remat"}])
def test_code_that_was_patched_in_is_named_once(
    change: Callable[[Any], None], options: dict[str, Any], said: Callable[..., list[str]]
) -> None:
    model = build("Llama")
    change(model)
    (message,) = said(model, **options)
    assert change.__name__ in message
    assert "prove(model)" in message
    assert said(model) == []


def test_a_patched_class_is_named(said: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, shifted(x)))
    (message,) = said(build("Llama"))
    assert "test_a_patched_class_is_named" in message


def test_what_was_compared_and_adapters_of_linear_layers_say_nothing(said: Callable[..., list[str]]) -> None:
    peft = pytest.importorskip("peft")
    for kind in ("Gemma2", "Mixtral", "Qwen3"):
        assert said(build(kind, **({"attn_logit_softcapping": None} if kind == "Gemma2" else {}))) == []
    model = build("Llama")
    assert said(model, loss_tile=4, checkpoint="remat") == []
    assert said(model) == []
    for config in (
        peft.LoraConfig(target_modules=["q_proj", "down_proj"]),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ):
        assert said(peft.get_peft_model(build("Llama"), config)) == []


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
            inject(injected, config)
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


def inject(model: Any, config: Any) -> None:
    """Add an adapter by transformers, or by PEFT where transformers wants one that is not released: 5.24 wants 0.22."""
    from peft import inject_adapter_in_model

    try:
        model.add_adapter(config)
    except ValueError as error:
        if "The version of PEFT" not in str(error):
            raise
        inject_adapter_in_model(config, model)


def adapted(kind: str, ways: random.Random) -> Any:
    """A model with an adapter of random weights, in one of the ways that it may be added."""
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as KINDS

    more = {"use_dora": True} if kind == "LORA" and ways.random() < 0.5 else {}
    config = KINDS[kind](**{"target_modules": ["q_proj", "down_proj"]} | SMALL.get(kind, {}) | more)
    torch.manual_seed(1)
    model = build("Llama")
    if kind in ("IA3", "LOHA", "LORA", "OFT") and ways.random() < 0.5:
        inject(model, config)  # which others refuse
    else:
        model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model if kind == "C3A" else model.double()  # whose products are in float32


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@over_ranks(2, timeout=150)
def test_adapters_of_each_token_are_exact(rank: int, ranks: int) -> None:
    draw = random.Random(seed := 3)
    for kind in draw.sample(sorted(_EACH_TOKEN), 10):
        whole = text(1, draw.randrange(9, 16), seed=seed, unlabelled=draw.randrange(8))
        way = draw.random()
        want, model = (adapted(kind, random.Random(way)) for _ in range(2))
        want(**whole).loss.backward()
        dfa_hf.distribute_attention(model)
        model(**whole).loss.backward()
        assert_gradients(model, gradients(want), kind, 1e-4 if kind == "C3A" else 1e-5)
