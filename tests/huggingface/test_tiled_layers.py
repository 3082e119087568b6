"""Norms and MLPs that compute tile by tile change no loss and no gradient, and never see more than a tile."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.tiles.tiled_layers import TiledTokens, tiled_class
from tests.huggingface.compared import assert_gradients
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks

TILE = 3
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Qwen3", {}),  # norms of heads
    ("Gemma3Text", {}),  # norms of heads behind their transpose
    ("Olmo2", {}),
    ("Phi3", {}),
    ("GPTNeoX", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),  # layer norms with biases
]  # fmt: skip
WAYS: list[dict[str, Any]] = [{}, {"checkpoint": "remat"}, {"checkpoint": "full", "loss_tile": 5}]


def noted(model: Any) -> list[int]:
    """Return the tokens of each linear layer's call, in MLPs, from now on."""
    seen: list[int] = []
    mlps = [module for module in model.modules() if isinstance(module, TiledTokens) and [*module.children()]]
    for linear in (x for mlp in mlps for x in mlp.modules() if isinstance(x, torch.nn.Linear)):
        linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel() // args[0].shape[-1]))
    return seen


def models(rank: int, ranks: int) -> None:
    for number, (kind, changes) in enumerate(MODELS):
        whole = text(2, 7 * ranks - 2, seed=number, unlabelled=5)
        one = build(kind, **changes).double()
        one(**whole).loss.backward()
        wants = gradients(one)
        for reentrant, way in ((False, WAYS[number % 3]), (True, WAYS[1])):
            model = build(kind, **changes).double()
            config = TrainingConfig(mlp_tile=TILE, **way)
            model = copy.deepcopy(dfa_hf.distribute_attention(model, config=config, reentrant=reentrant))
            seen = noted(model)
            model(**dfa_hf.shard_batch(whole)).loss.backward()
            assert 0 < max(seen) <= TILE, kind
            assert_gradients(model, wants, kind)


def test_layers_by_tiles_have_the_gradients_of_one_process() -> None:
    run_ranks(3, models, timeout=120)


def test_all_norms_and_mlps_are_tiled_and_tiles_end_with_the_option() -> None:
    model = dfa_hf.distribute_attention(build("Qwen3"), config=TrainingConfig(mlp_tile=TILE))
    norms = [name for name, _ in model.named_modules() if name.rpartition(".")[2].endswith("norm")]
    tiled = {name for name, module in model.named_modules() if isinstance(module, TiledTokens)}
    assert tiled == {*norms, "model.layers.0.mlp", "model.layers.1.mlp"}
    assert len(norms) == 9
    batch, seen = dfa_hf.shard_batch(text(1, 8, seed=1)), noted(model)
    by_tiles = model(**batch).loss
    assert max(seen) == TILE
    seen.clear()
    torch.testing.assert_close(dfa_hf.distribute_attention(model)(**batch).loss, by_tiles)
    assert min(seen) == 8


def test_a_model_that_computes_by_tiles_is_saved_whole() -> None:
    options = TrainingConfig(mlp_tile=TILE, loss_tile=TILE)
    model, file = dfa_hf.distribute_attention(build("Llama"), config=options), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    batch, seen = dfa_hf.shard_batch(text(1, 8, seed=1)), noted(loaded)
    assert torch.equal(model(**batch).loss, loaded(**batch).loss)
    assert max(seen) == TILE
    assert [type(one) for one in model.modules()] == [type(one) for one in loaded.modules()]


class Dropping(torch.nn.Linear):
    """An MLP whose dropout is a function and no module, as in Seed-OSS and Starcoder2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("by_function", [True, False])
def test_a_tile_draws_the_same_numbers_again_in_the_backward(by_function: bool) -> None:
    if by_function:
        mlp: Any = Dropping(4, 4, bias=False)
        torch.nn.init.eye_(mlp.weight)
    else:
        mlp = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Dropout(0.5))
        torch.nn.init.eye_(mlp[0].weight)
    mlp.__class__ = tiled_class(TiledTokens, type(mlp))
    mlp.dfa_tile = TILE
    x = torch.ones(1, 7, 4, requires_grad=True)
    out = mlp(x)
    out.sum().backward()
    assert {*out.flatten().tolist()} == {0.0, 2.0}
    assert x.grad is not None
    assert torch.equal(x.grad, out)


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("Mixtral", {"num_local_experts": 2}, "an MLP of class MixtralSparseMoeBlock"),
        ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 32, "dropout": 0.0}, "no MLP in a module of its own"),
    ],
)
def test_other_mlps_are_refused(kind: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        dfa_hf.distribute_attention(build(kind, **changes), config=TrainingConfig(mlp_tile=TILE))
