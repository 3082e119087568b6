"""Whether attention is distributed belongs to a forward: its recompute, and other models, do not change it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import checkpointing
from dfa_megatron.huggingface.current_forward import KEYWORD
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.compared import summed
from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {}),
    ("Mistral", {"sliding_window": 5}),
    ("Gemma3Text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
)


def evaluate(model: Any) -> None:
    """Evaluate each rank by itself, in a thread of its own."""
    ThreadPoolExecutor(1).submit(_evaluate, model).result()


def _evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad(), dfa_hf.local_attention(model):
        model(**text(1, 10, seed=7))
    model.train()


def generate(model: Any) -> None:
    with dfa_hf.local_attention(model):
        model.generate(text(1, 6, seed=8)["input_ids"], max_new_tokens=2, do_sample=False)
    model.train()


def fail(model: Any) -> None:
    model.eval()
    with pytest.raises(UnsupportedError), dfa_hf.local_attention(model):
        model(**text(1, 8, seed=7), prompt_tree=([8], [-1]))
    model.train()


BETWEEN: tuple[Callable[[Any], None], ...] = (evaluate, generate, fail)


def evaluation_between(rank: int, world_size: int) -> None:
    for number, (kind, changes) in enumerate(KINDS):
        part = text(2, 6 * world_size, seed=number, unlabelled=3)
        wanted: dict[str, torch.Tensor] = {}
        ways = (("none", False), ("full", True), ("remat", True), ("full", False), ("auto", bool(number % 2)))
        for checkpoint, reentrant in ways:
            model = build(kind, number, **changes).double()
            options = TrainingConfig(checkpoint=checkpoint)
            if checkpoint == "auto":
                dfa_hf.distribute_attention(model, config=options)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            else:
                dfa_hf.distribute_attention(model, config=options, reentrant=reentrant)
            loss = model(**part).loss
            if checkpoint != "none":
                BETWEEN[(number + rank) % 3](model)
            loss.backward()
            found = summed(model)
            wanted = wanted or found
            for name, gradient in wanted.items():
                assert_close(found[name], gradient, tolerance=1e-12, name=f"{kind} {checkpoint} {name}")


def local_forward(rank: int, world_size: int) -> None:
    """A local forward in training, whose backward comes when attention is distributed again, and the other way."""
    whole = text(1, 12, seed=3)
    want = build("Llama").double()
    want(**whole).loss.backward()
    for reentrant in (True, False):
        model = build("Llama").double()
        options = TrainingConfig(checkpoint="full")
        dfa_hf.distribute_attention(model, config=options, reentrant=reentrant)
        with dfa_hf.local_attention(model):
            loss = model(**whole).loss
        model(**whole)
        loss.backward()
        for name, gradient in gradients(model).items():
            assert_close(gradient, gradients(want)[name], tolerance=1e-6, name=f"local {name}")
        model.zero_grad()
        loss = model(**whole).loss
        with dfa_hf.local_attention(model):
            loss.backward()
        for name, gradient in summed(model).items():
            assert_close(gradient / world_size, gradients(want)[name], tolerance=1e-6, name=f"distributed {name}")


def shared_config(rank: int, world_size: int) -> None:
    """Two models of one config object, and a third of the first one's."""
    whole, config = text(1, 12, seed=3), build("Llama").config
    before = copy.deepcopy(config.to_dict()), config._attn_implementation
    kind = type(build("Llama"))
    first, second = (kind(config).double() for _ in range(2))
    for model in (first, second):
        model.load_state_dict(build("Llama").state_dict())
    want = build("Llama").double()(**whole).loss
    part = whole
    dfa_hf.distribute_attention(first)
    assert_close(second(**whole).loss, want, tolerance=1e-6, name="the other model, as it was")
    dfa_hf.distribute_attention(second, config=TrainingConfig(checkpoint="full"), reentrant=True)
    third = kind(first.config).double()
    third.load_state_dict(second.state_dict())
    dfa_hf.distribute_attention(third)
    second(**part).loss.backward()
    once = summed(second)
    second.zero_grad()
    loss = second(**part).loss
    evaluate(first)
    loss.backward()
    for name, gradient in summed(second).items():
        assert_close(gradient, once[name], tolerance=1e-12, name=name)
    for model in (first, second, third):
        with dfa_hf.local_attention(model):
            assert_close(model(**whole).loss, want, tolerance=1e-6, name="local")
    assert (config.to_dict(), config._attn_implementation) == before


def called_alone(rank: int, world_size: int) -> None:
    model = build("Llama").double()
    dfa_hf.distribute_attention(model)
    inputs = {"input_ids": text(1, 12, seed=3)["input_ids"]}
    want = model.model(**inputs).last_hidden_state
    evaluate(model)
    assert torch.equal(model.model(**inputs).last_hidden_state, want)
    with dfa_hf.local_attention(model):
        local = model.model(**inputs).last_hidden_state
    assert_close(want, shard_sequence(local), tolerance=1e-6, name="the decoder alone, in evaluation")


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_in_another_thread_has_its_documents(reentrant: bool) -> None:
    pack = text(1, 12, seed=3) | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])}
    found = []
    for checkpoint in ("none", "full"):
        model = build("Llama").double()
        options = TrainingConfig(checkpoint=checkpoint)
        dfa_hf.distribute_attention(model, config=options, reentrant=reentrant and checkpoint != "none")
        loss = model(**pack).loss
        model(**text(1, 12, seed=4))
        ThreadPoolExecutor(1).submit(loss.backward).result()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, tolerance=1e-12, name=name)


def own_checkpoint(model: Any, keeps: bool) -> Any:
    for layer in model.model.layers:

        def forward(*args: Any, own: Any = layer.forward, **kwargs: Any) -> Any:
            kept = {name: value for name, value in kwargs.items() if keeps or name != KEYWORD}
            return torch.utils.checkpoint.checkpoint(functools.partial(own, **kept), *args, use_reentrant=True)

        layer.forward = forward
    return model


def two_models(rank: int, world_size: int) -> None:
    whole = text(1, 12, seed=3)
    pack = whole | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])}
    parts = (pack, whole)
    wanted = []
    for checkpointed in (False, True):
        models = [dfa_hf.distribute_attention(build(kind).double()) for kind in ("Llama", "Qwen3")]
        for model in models if checkpointed else ():
            own_checkpoint(model, keeps=True)
        losses = [model(**part).loss for model, part in zip(models, parts, strict=True)]
        for loss in losses:
            loss.backward()
        wanted.append([summed(model) for model in models])
    for found, want in zip(wanted[1], wanted[0], strict=True):
        for name, gradient in want.items():
            assert_close(found[name], gradient, tolerance=1e-12, name=name)
    model = own_checkpoint(dfa_hf.distribute_attention(build("Llama")), keeps=False)
    with pytest.raises(UnsupportedError, match=r"a layer of type .*Attention that runs again in the backward"):
        model(**whole).loss.backward()


def each(rank: int, world_size: int) -> None:
    for check in (evaluation_between, local_forward, shared_config, called_alone, two_models):
        check(rank, world_size)


def test_a_forward_keeps_its_attention_whatever_runs_or_is_set_before_its_backward() -> None:
    """Evaluations between, other modes, models of one config, decoders alone, and a recompute that nothing tells."""
    run_ranks(3, each, timeout=170)


def test_checkpoints_that_run_attention_twice_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing._say_twice.cache_clear()
    model = build("Llama")
    dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint="none"))
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.arange(12)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert caplog.text.count("checkpoint='none' runs their attention twice") == 1
