"""Models whose layers read keys that an indexer chooses are exact over ranks, choose once, and learn.

What indexers learn is compared with one process, by a loss written densely.
"""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import DisagreementError, ProofError, UnsupportedError
from dfa_megatron.huggingface import indexers
from dfa_megatron.huggingface.attention_function import PlannedMask
from dfa_megatron.sharding import positions_of
from tests.frameworks.compare import gradients_of
from tests.fuzz.frameworks.steps import check_each, run
from tests.huggingface.one_process import Float64, first_of_equals
from tests.huggingface.rows import of_type, row
from tests.huggingface.sweep.tiny import build, tried_here
from tests.support.close import assert_close
from tests.support.workers import by_turns, run_ranks

FAMILIES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4")


@pytest.mark.support("models", "indexers of single keys: whole, packed, in trees, padded, rematerialized")
def test_families_are_exact() -> None:
    draws = [of_type(kind, section, 2) for kind in FAMILIES for section in ("plain", "packed")]
    draws += [of_type(kind, "remat", 3) for kind in FAMILIES]
    draws += [of_type(kind, "tree", 3) for kind in ("deepseek_v32", "hy_v4")]
    padded: dict[str, Any] = {"rows": 2, "padding": "right"}
    draws += [row(f"{kind} padded", (kind, {}), 3, 24, **padded) for kind in ("glm_moe_dsa", "dots3_note_text")]
    draws += [row("glm_moe_dsa in FSDP2", ("glm_moe_dsa", {}), 2, 24, around="FSDP2")]
    draws += [row("glm_moe_dsa, re-entrant", ("glm_moe_dsa", {}), 2, 24, checkpoint="remat", reentrant=True)]
    draws += [row("glm_moe_dsa, checkpointed", ("glm_moe_dsa", {}), 2, 24, checkpoint="full", as_kept=True)]
    check_each("transformers", draws)


def keys_of_one_rank() -> AbstractContextManager[Any]:
    """Choose among the keys of this rank alone."""
    real = indexers.index_topk

    def local(*index: Any, group: Any, layout: Any, cu_seqlens: Any = None, **more: Any) -> Any:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        chosen = real(*index, group=alone, **more)
        first = positions_of(layout, dist.get_rank())[0]
        return torch.where(chosen >= 0, chosen + first, chosen).to(torch.int32)

    return patch.object(indexers, "index_topk", local)


def test_a_fault_is_noticed() -> None:
    draws = [of_type("deepseek_v32", "plain", 2, plant=keys_of_one_rank)]
    assert [outcome.kind for _, outcome in run("transformers", draws, 60.0, math.inf)] == ["wrong"]


@pytest.mark.parametrize("checkpoint", ["full", "remat", "auto"])
def test_no_recompute_chooses_again(checkpoint: str) -> None:
    model = build("glm_moe_dsa")
    if checkpoint == "auto":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=checkpoint))
    passes, batch = list[torch.Tensor](), {"input_ids": torch.arange(1, 31)[None], "labels": torch.arange(1, 31)[None]}

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        passes.append(output)

    def unsettle(module: nn.Module, args: Any, kwargs: Any) -> None:
        module.weights_proj.weight.data.neg_()  # another choice in each pass, if it were made

    for module in model.modules():
        if type(module).__name__ == "GlmMoeDsaIndexer":
            module.register_forward_pre_hook(unsettle, with_kwargs=True)
            module.register_forward_hook(note)
    model(**batch).loss.backward()
    assert len(passes) == 4
    assert torch.equal(passes[0], passes[3])
    assert torch.equal(passes[1], passes[2])


def test_shared_latents_are_not_checkpointed_by_the_reentrant_form() -> None:
    with pytest.raises(UnsupportedError, match="whose layers share keys"):
        dfa_hf.distribute_attention(build("mistral_large4"), config=TrainingConfig(checkpoint="full"), reentrant=True)


@pytest.mark.parametrize("name", ["Glm5NextTextIndexer", "Qwen4ExpTextQSAIndexer", "DeepseekV4HCACompressor"])
def test_models_that_choose_blocks_are_refused_by_name(name: str) -> None:
    model = build("deepseek_v32")
    model.model.layers[1].self_attn.indexer = type(name, (nn.Module,), {})()
    with pytest.raises(UnsupportedError, match=f"{name}: it chooses blocks of keys"):
        dfa_hf.distribute_attention(model, unlisted=True)


def test_what_an_indexer_asks_for_is_followed_or_refused() -> None:
    keys, queries = torch.ones(1, 4, 3), torch.ones(1, 4, 2, 3)

    def indexed() -> Any:
        return indexers.Indexed(keys, 4, lambda q, k, weights, topk: weights * topk)

    found = torch.nn.functional.relu(torch.matmul(queries, indexed().transpose(-1, -2).float().unsqueeze(1)) * 2.0)
    found = torch.matmul(torch.ones(1, 4, 1, 2), found).squeeze(-2).masked_fill(~PlannedMask(), -math.inf)
    assert torch.equal(found.topk(3, dim=-1).indices, torch.full((1, 4, 2), 6.0))
    wrong = (
        lambda x: x * -1.0,
        lambda x: x.topk(3, dim=-1),
        lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool), -math.inf),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.nn.functional.relu(x),
        lambda x: torch.matmul(queries, torch.matmul(queries, x)).topk(1, dim=-1),
    )
    for ask in wrong:
        with pytest.raises(UnsupportedError, match="an indexer that asks for"):
            ask(indexed())


def test_adapters_of_latents_count_and_their_dropout_is_refused() -> None:
    plain, adapted = build("deepseek_v32"), build("deepseek_v32")
    for model in (plain, adapted):
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.register_forward_hook(_doubled)
    adapted = dfa_hf.distribute_attention(adapted, unlisted=True)
    batch = {"input_ids": torch.arange(1, 9)[None]}
    assert_close(adapted(**batch).logits, plain(**batch).logits, tolerance=1e-6)
    adapted.model.layers[0].self_attn.kv_b_proj.add_module("dropout", nn.Dropout(0.1))
    with pytest.raises(UnsupportedError, match="dropout in kv_b_proj"):
        adapted(**batch)


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


OF_WHOLE_MODELS = {"emu3_text_model", "mllama_text_model"}
"""Types that are no model by themselves."""


def test_within_local_attention_a_model_computes_what_it_did_before() -> None:
    others = sorted({*tried_here()} - {*FAMILIES} - OF_WHOLE_MODELS)
    for kind in (*FAMILIES, *by_turns(others)):
        model = build(kind).eval()
        words = min(90, model.config.get_text_config().vocab_size)
        ids = torch.randint(3, words, (2, 21), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            want = model(input_ids=ids, use_cache=False).logits
            dfa_hf.distribute_attention(model)
            with dfa_hf.local_attention(model):
                assert_close(model(input_ids=ids, use_cache=False).logits, want, tolerance=1e-6, name=kind)


def _proofs(rank: int, ranks: int) -> list[str]:
    found = []
    for kind in ("deepseek_v32", "hy_v4"):
        for dtype in (torch.float32, torch.bfloat16):
            model = dfa_hf.distribute_attention(build(kind).to(dtype))
            found.append(str(dfa_hf.prove(model)))
            with keys_of_one_rank(), pytest.raises(ProofError, match=r"first difference: .* choice of keys: .*indexer"):
                dfa_hf.prove(model)
    return found


def test_prove_replays_the_choice_of_keys_and_compares_it() -> None:
    for proof in run_ranks(2, _proofs, timeout=120)[0]:
        assert "choice of keys" in proof
        assert "2 ranks compute what one rank computes" in proof


WEIGHT = 0.5
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
    return (loss + WEIGHT * learned).detach(), learned.detach(), gradients_of(model)


def _precise(checkpoint: str) -> AbstractContextManager[Any]:
    """Compute all in float64, but for recomputes, which do not see it."""
    return Float64() if checkpoint == "none" else nullcontext()


def over_ranks_of(kind: str, form: str, checkpoint: str) -> Learned:
    model = dfa_hf.distribute_attention(build(kind), config=TrainingConfig(checkpoint=checkpoint))
    dfa_hf.train_indexers(model, WEIGHT)
    replicated = DistributedDataParallel(model, find_unused_parameters=True)  # makes outputs anew, averages gradients
    with _precise(checkpoint):
        loss = replicated(**batch_of(form)).loss
        loss.backward()
    return loss.detach(), dfa_hf.indexer_loss(model).detach(), gradients_of(model)


WHOLE = [(kind, "plain", "none") for kind in FAMILIES]
PARTS = [
    ("deepseek_v32", "packed", "none"),
    ("hy_v4", "packed", "remat"),
    *(("glm_moe_dsa", "padded", checkpoint) for checkpoint in ("full", "remat")),
]


def _learn(rank: int, ranks: int, cases: list[tuple[str, str, str]]) -> list[Learned]:
    found, model = [over_ranks_of(*case) for case in cases], dfa_hf.distribute_attention(build("deepseek_v32"))
    dfa_hf.train_indexers(model, 2.0 + (rank == 1))
    with pytest.raises(DisagreementError, match=r"weight: 2.0 on .*3.0 on rank 1"):
        model(**batch_of("plain"))
    return found


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
