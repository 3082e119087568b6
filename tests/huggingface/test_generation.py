"""A model that is distributed generates over its group, token for token as one process, and its cache is spread."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface.current_forward import CONTEXT
from tests.huggingface import conftest
from tests.support.models import build, text
from tests.support.workers import preload, run_ranks

KINDS = ("deepseek_v3", "gemma4_text", "gpt_oss", "llama4_text", "jamba", "qwen3_next")
"""Latent keys; windows and shared keys; sinks; chunks and temperatures; states of two kinds, with convolutions."""

if conftest.INSTALLED:
    files = {kind.removesuffix("_text") for kind in KINDS}
    preload("tests.huggingface.generated", *(f"transformers.models.{name}.modeling_{name}" for name in files))


def sweep(rank: int, world_size: int, kinds: tuple[str, ...], *options: dict[str, Any]) -> dict[str, float]:
    from tests.huggingface.generated import ALONE, PADDED, compared

    found = {}
    for kind in kinds:
        for prompt in (ALONE, PADDED) if kind == kinds[0] else (PADDED,):  # whose first row has no padding either
            for asked in options:
                same, worst, _ = compared(kind, prompt, **asked)
                found[f"{kind} {prompt} {asked}"] = worst if same else float("inf")
    return found


@pytest.mark.support("models", "generation over ranks: greedy, sampling; windows, sinks, states; padding on the left")
def test_generations_are_those_of_one_process() -> None:
    for found in run_ranks(3, sweep, KINDS, {"max_new_tokens": 12}, timeout=170):
        assert {name: worst for name, worst in found.items() if not worst < 3e-9} == {}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_generates_greedily_and_by_sampling(ranks: int) -> None:
    for found in run_ranks(ranks, sweep, ("llama",), {}, {"do_sample": True, "top_k": 9}, timeout=100):
        assert max(found.values()) < 1e-9


def spread(rank: int, world_size: int) -> tuple[int, int, list[int], torch.Tensor]:
    model = build(
        "Gemma3Text", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8
    )
    asked: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    ids = text(2, 600, seed=4)["input_ids"] % 50 + 3
    want = model.eval().generate(ids, **asked, output_scores=True, eos_token_id=None)
    dfa_hf.distribute_attention(model)
    got = model.generate(ids, **asked, output_scores=True, eos_token_id=None)
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.scores, want.scores, strict=True):
        assert torch.allclose(ours.log_softmax(-1), theirs.log_softmax(-1), atol=1e-5)
    whole = sum(x.nbytes for layer in want.past_key_values.layers for x in (layer.keys, layer.values))
    cache = got.past_key_values
    return cache.nbytes, whole, [cache.progress.held(layer.sight) for layer in cache.layers], got.sequences


def test_a_rank_holds_its_share_of_the_cache_in_float32_too() -> None:
    found = run_ranks(3, spread, timeout=100)
    for nbytes, whole, (full, window), ids in found:
        assert nbytes < 1.25 * whole / 3, (nbytes, whole)
        assert full in (209, 210), "629 tokens were seen, and new ones went to each rank in turn"
        assert window in (2, 3), "the window's 8 tokens are kept, and new ones go round"
        assert torch.equal(ids, found[0][3])


def refused(rank: int, world_size: int) -> None:
    ids = text(1, 5, seed=1)["input_ids"] % 50 + 3
    model = dfa_hf.distribute_attention(build("Llama").eval())
    asks: tuple[dict[str, Any], ...] = (
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 2},
        {"output_attentions": True},
        {"assistant_model": model},
    )
    for asked in asks:
        with pytest.raises(UnsupportedError, match=next(iter(asked))):
            model.generate(ids, max_new_tokens=2, **asked)
    with pytest.raises(UnsupportedError, match="padding on the left"):
        model.generate(ids, max_new_tokens=2, attention_mask=torch.tensor([[1, 1, 1, 0, 1]]))
    model.train().extra = torch.nn.Dropout(0.1)
    with pytest.raises(UnsupportedError, match="training mode"):
        model.generate(ids, max_new_tokens=2)
    del model.eval().extra
    with dfa_hf.local_attention(model):
        model.generate(ids, max_new_tokens=2, num_beams=2)
    with pytest.raises(DisagreementError, match="different tokens at this prompt"):
        model.generate(ids + rank, max_new_tokens=2)
    torch.manual_seed(rank)
    with pytest.raises(DisagreementError, match="random state"):
        model.generate(ids, max_new_tokens=9, do_sample=True, temperature=9.0)
    torch.manual_seed(0)
    assert model.generate(ids, max_new_tokens=2, do_sample=True).shape == (1, 7)


def test_caches_and_models_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfa_megatron.huggingface.generation import sharded_cache, steps
    from dfa_megatron.huggingface.recurrent.stand_ins import FORWARDS

    model, ids = dfa_hf.distribute_attention(build("Llama").eval()), text(1, 5, seed=1)["input_ids"] % 50 + 3
    getattr(model, CONTEXT).multimodal = True
    with pytest.raises(UnsupportedError, match="a multimodal model"):
        model.generate(ids, max_new_tokens=2)
    getattr(model, CONTEXT).multimodal = False
    model.states = type(next(iter(FORWARDS)), (torch.nn.Module,), {})()
    with pytest.raises(UnsupportedError, match="of states alone"):
        model.generate(ids, max_new_tokens=2)
    del model.states
    odd: Any = type("OddLayer", (), {})()
    with pytest.raises(UnsupportedError, match="a cache layer of type OddLayer"):
        sharded_cache.ShardedCache._layer(odd, odd, chunked=False)
    forward: Any = SimpleNamespace(cache=SimpleNamespace(sights=set()))
    x = torch.zeros(1, 1, 2, 8)
    with pytest.raises(UnsupportedError, match="attends over 1 tokens of a cache with None"):
        steps.attend(forward, ((-1, -1), None), (x, x, x), {})
    monkeypatch.setitem(sys.modules, "dfa_megatron.huggingface.generation.steps", None)
    with pytest.raises(UnsupportedError, match="with this transformers"):
        model.generate(ids, max_new_tokens=2)


def test_what_would_differ_or_need_a_whole_cache_is_refused() -> None:
    run_ranks(2, refused)


def without_the_exchange(rank: int, world_size: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dfa_megatron.runtime.comm.channel.Channel.gather", lambda over, x, kind=None: [x])
        return max(sweep(rank, world_size, ("llama",), {}).values())


def test_a_rank_that_sees_its_own_keys_alone_is_wrong() -> None:
    assert min(run_ranks(2, without_the_exchange, timeout=100)) > 1e-3
