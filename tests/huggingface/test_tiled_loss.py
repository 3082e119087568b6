"""A transformers model with loss_tile has the loss, gradients and scores of one process with dense logits."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.tiled_head import causal_loss
from dfa_megatron.loss import by_document, scores_of
from dfa_megatron.loss.deferred import DeferredLogits
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.models import build, gradients, text
from tests.support.workers import run_each

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"tie_word_embeddings": False}),
    ("Llama", {"tie_word_embeddings": True}),
    ("Cohere", {"logit_scale": 0.3}),
    ("Granite", {"logits_scaling": 3.0}),
    ("Gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "attention_dropout": 0.0}),
]
TILED = TrainingConfig(loss_tile=5)


def models(rank: int, ranks: int) -> None:
    for seed, (kind, changes) in enumerate(MODELS):
        whole = text(2, length := 6 * ranks + 1, seed=seed, unlabelled=5 + seed)
        one = build(kind, **changes).double()
        labels = F.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
        logits = one(input_ids=whole["input_ids"]).logits
        want = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        want.backward()
        logp = logits.detach().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0)
        model = copy.deepcopy(dfa_hf.distribute_attention(build(kind, **changes).double(), config=TILED))
        with scores_of(model) as scores:
            output = model(**whole)
        output.loss.backward()
        assert isinstance(output.logits, DeferredLogits)
        assert_loss(output.loss, want, kind, 1e-6)  # transformers norms in float32
        for row, (got, wanted) in enumerate(((scores.logprobs, picked), (scores.entropy, entropy))):
            torch.testing.assert_close(
                torch.cat(by_document(got, (0, 2, length)), -1), wanted, rtol=1e-5, atol=1e-5, msg=f"{kind} {row}"
            )
        assert_gradients(model, gradients(one), kind)


def sharded(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, whole = init_device_mesh("cpu", (ranks,)), text(2, 6 * ranks, seed=1, unlabelled=5)
    for tied, own_shard in ((False, True), (True, False), (False, False)):
        one, model = (build("Llama", tie_word_embeddings=tied) for _ in range(2))
        one(**whole).loss.backward()
        dfa_hf.distribute_attention(model, config=TILED)
        tail = [] if tied else [model.lm_head] if own_shard else [[model.model.norm, model.lm_head]]
        for module in (*model.model.layers, *tail, model):  # norm and head together: as accelerate does
            fully_shard(module, mesh=mesh)
        output = model(**whole)
        assert isinstance(output.logits, DeferredLogits)
        output.loss.backward()
        wants = gradients(one)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), wants[name], rtol=1e-4, atol=1e-5, msg=name)


def test_loss_by_tiles_has_the_gradients_of_one_process_also_of_parameters_sharded_by_fsdp() -> None:
    run_each(3, models, sharded, timeout=120)


def test_tiles_end_with_the_option_and_logits_without_labels_are_whole() -> None:
    model = dfa_hf.distribute_attention(build("Llama"), config=TILED)
    batch = text(1, 8, seed=1)
    assert model(input_ids=batch["input_ids"]).logits.shape == (1, 8, 61)
    tiled = model(**batch)
    with pytest.raises(AttributeError, match="shape of the logits of a call with labels"):
        _ = tiled.logits.shape
    for refused in (torch.exp, lambda logits: torch.argmax(logits, dim=0), lambda logits: logits * torch.ones(1)):
        with pytest.raises(UnsupportedError, match="with loss_tile"):
            refused(tiled.logits)
    whole = dfa_hf.distribute_attention(model)(**batch)
    torch.testing.assert_close(tiled.loss, whole.loss)
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    want = F.cross_entropy(whole.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.3)
    for one in (tiled, whole):
        torch.testing.assert_close(causal_loss(one.logits, None, 61, shift_labels=labels, label_smoothing=0.3), want)
    best = whole.logits.max(dim=-1)
    torch.testing.assert_close(tuple(tiled.logits.max(dim=-1)), tuple(best))
    assert torch.equal(torch.argmax(tiled.logits, dim=-1), best.indices)


def test_a_model_whose_loss_goes_by_tiles_is_saved_whole() -> None:
    model, file = dfa_hf.distribute_attention(build("Llama"), config=TILED), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    batch = text(1, 8, seed=1)
    assert isinstance(loaded(**batch).logits, DeferredLogits)
    assert torch.equal(model(**batch).loss, loaded(**batch).loss)
    assert [type(one) for one in model.modules()] == [type(one) for one in loaded.modules()]


@pytest.mark.parametrize("way", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_head_that_gets_an_adapter_after_loss_tile_is_set_is_refused_and_another_linear_one_is_tiled(
    way: dict[str, Any],
) -> None:
    peft = pytest.importorskip("peft")
    model = dfa_hf.distribute_attention(build("Llama"), config=TILED)
    batch = text(1, 8, seed=1)
    model.lm_head = torch.nn.Linear(32, 61)
    assert isinstance(model(**batch).logits, DeferredLogits)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **way}))
    assert adapted(input_ids=batch["input_ids"]).logits.shape == (1, 8, 61)
    with pytest.raises(UnsupportedError, match="a head of type peft"):
        adapted(**batch)
    dfa_hf.distribute_attention(adapted)
    assert adapted(**batch).logits.shape == (1, 8, 61)


def test_another_head_or_loss_is_refused() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    model = build("Llama")
    model.lm_head = Adapted(32, 61)
    with pytest.raises(UnsupportedError, match=r"a head of type .*Adapted"):
        dfa_hf.distribute_attention(model, config=TILED, unlisted=True)
    model = build("Llama")
    model.loss_function = F.cross_entropy
    with pytest.raises(UnsupportedError, match="the loss function cross_entropy"):
        dfa_hf.distribute_attention(model, config=TILED)
