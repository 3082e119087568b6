"""Indexers of transformers' models learn over ranks what they learn in one process, from a loss written densely."""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.one_process import Float64, first_of_equals
from tests.huggingface.sweep.tiny import build
from tests.support.close import assert_close
from tests.support.workers import by_turns, run_ranks

WEIGHT = 0.5
FAMILIES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4")
Learned = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""The model's loss, the indexers', and gradients by name."""


def batch_of(form: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 90, (1 if form == "packed" else 2, 21), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if form == "packed":
        batch["position_ids"] = torch.cat([torch.arange(hi) for hi in (3, 11, 7)])[None]
    if form == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 12:] = 0
        batch["labels"][1, 12:] = -100
    return batch


def densely(kind: str, form: str, checkpoint: str) -> Learned:
    """Return what one process learns with eager attention and the indexers' own scores, of transformers' code alone."""
    model = build(kind)
    scored, losses, batch = dict[nn.Module, torch.Tensor](), list[torch.Tensor](), batch_of(form)
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

    def score(indexer: Any, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(indexer).forward).bind(indexer, *args, **kwargs)
        given = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in bound.arguments.items()}

        def note(scores: torch.Tensor, topk: int, **more: Any) -> Any:
            scored[indexer] = scores
            return real(scores, topk, **more)

        real = torch.Tensor.topk
        with patch.object(torch.Tensor, "topk", note):
            inspect.unwrap(type(indexer).forward)(**given)

    def compare(layer: Any, args: Any, output: Any) -> None:
        teacher = output[1].detach().sum(1)  # over heads; 0 where a key was not chosen
        teacher = teacher / teacher.sum(-1, keepdim=True)
        student = scored[layer.indexer].masked_fill(teacher == 0, -math.inf).log_softmax(-1)
        kl = (torch.xlogy(teacher, teacher) - teacher * student.masked_fill(teacher == 0, 0.0)).sum(-1)
        losses.append(kl[valid].mean())

    for module in model.modules():
        if getattr(module, "indexer", None) is not None:
            module.indexer.register_forward_pre_hook(score, with_kwargs=True)
            module.register_forward_hook(compare)
    with _precise(checkpoint), first_of_equals():
        loss, learned = model(**batch, use_cache=False).loss, torch.stack(losses).sum()
        (loss + WEIGHT * learned).backward()
    return (loss + WEIGHT * learned).detach(), learned.detach(), _gradients(model)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _precise(checkpoint: str) -> AbstractContextManager[Any]:
    """Compute all in float64, but for recomputes, which do not see it."""
    return Float64() if checkpoint == "none" else nullcontext()


def over_ranks_of(rank: int, ranks: int, kind: str, form: str, checkpoint: str) -> Learned:
    model = dfa_hf.distribute_attention(build(kind), config=TrainingConfig(checkpoint=checkpoint))
    dfa_hf.train_indexers(model, WEIGHT)
    replicated = DistributedDataParallel(model, find_unused_parameters=True)  # makes outputs anew, averages gradients
    with _precise(checkpoint):
        loss = replicated(**batch_of(form)).loss
        loss.backward()
    return loss.detach(), dfa_hf.indexer_loss(model).detach(), _gradients(model)


WHOLE = [(kind, "plain", "none") for kind in FAMILIES]
PARTS = [
    ("deepseek_v32", "packed", "none"),
    ("hy_v4", "packed", "remat"),
    *(("glm_moe_dsa", "padded", checkpoint) for checkpoint in ("full", "remat")),
]


def _learn(rank: int, ranks: int, cases: list[tuple[str, str, str]]) -> list[Learned]:
    return [over_ranks_of(rank, ranks, *case) for case in cases]


@pytest.mark.support("models", "the loss that trains indexers: whole, packed, padded, rematerialized")
@pytest.mark.parametrize(("ranks", "cases"), [(3, by_turns(WHOLE)), (2, by_turns(PARTS))], ids=["whole", "parts"])
def test_indexers_learn_what_they_do_in_one_process(ranks: int, cases: list[tuple[str, str, str]]) -> None:
    expected = [densely(*case) for case in cases]
    for found in run_ranks(ranks, _learn, cases, timeout=300.0):
        for case, (loss, learned, gradients), (all_of_it, dense, own) in zip(cases, found, expected, strict=True):
            near = 1e-8 if case[2] == "none" else 1e-5
            assert_close(learned, dense, tolerance=near, name=f"{case}, the indexers' loss")
            assert_close(loss, all_of_it, tolerance=near, name=f"{case}, the loss")
            assert gradients.keys() == own.keys(), case
            assert any("indexer" in name and x.abs().max() > 1e-6 for name, x in own.items()), case
            for name, gradient in gradients.items():
                assert_close(gradient, own[name], tolerance=near, name=f"{case}, {name}")


def test_what_cannot_learn_is_refused() -> None:
    model = build("deepseek_v32")
    with pytest.raises(UnsupportedError, match="it is not distributed"):
        dfa_hf.train_indexers(model)
    dfa_hf.distribute_attention(model)
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(UnsupportedError, match="it is the weight of a loss"):
            dfa_hf.train_indexers(model, weight)
    for module in model.modules():
        if getattr(module, "indexer", None) is not None:
            module.indexer.requires_grad_(requires_grad=False)
    with pytest.raises(UnsupportedError, match="requires_grad=False"):
        dfa_hf.train_indexers(model)
    with pytest.raises(UnsupportedError, match="did not train indexers"):
        dfa_hf.indexer_loss(model)
    llama = dfa_hf.distribute_attention(build("llama"))
    with pytest.raises(UnsupportedError, match="it has none"):
        dfa_hf.train_indexers(llama)
    reentrant = dfa_hf.distribute_attention(
        build("deepseek_v32"), config=TrainingConfig(checkpoint="full"), reentrant=True
    )
    dfa_hf.train_indexers(reentrant)
    with pytest.raises(UnsupportedError, match="re-entrant checkpoints"):
        reentrant(**batch_of("plain"))


def test_a_model_that_learns_is_copied_without_its_loss() -> None:
    model = dfa_hf.distribute_attention(build("deepseek_v32"))
    dfa_hf.train_indexers(model)
    model(**batch_of("plain")).loss.backward()
    copied = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="did not train indexers"):
        dfa_hf.indexer_loss(copied)
    copied(**batch_of("plain")).loss.backward()
    assert torch.equal(dfa_hf.indexer_loss(copied), dfa_hf.indexer_loss(model))
