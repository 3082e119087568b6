"""A model's type is no proof for code that is not transformers' own: classes are refused, what is patched is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import check_model
from tests.support.models import build


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
