"""Losses are those of one process: by tiles with its gradients and scores, and functions of one's own that are marked.

Another loss function is refused.
"""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface.loss import tiled_loss
from dfa_megatron.huggingface.tiled_head import causal_loss
from dfa_megatron.loss import by_document, scores_of
from dfa_megatron.loss.deferred import DeferredLogits
from tests.huggingface.one_process import assert_gradients, assert_loss
from tests.support.models import build, gradients, text
from tests.support.workers import run_each

Loss = Callable[..., torch.Tensor]


def weighed(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None, z: float = 0.0, power: float = 0.0, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Cross-entropy, with that of rare tokens weighed (as focal losses do) and the squares of logsumexp added."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    each = each * (1 - torch.exp(-each)) ** power
    each = each + z * logits.logsumexp(-1).flatten().square() * (shift_labels.flatten() != -100)
    count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return each.sum() / count


def drawn(draw: random.Random) -> Loss:
    """A sum over tokens, as a function, with arguments bound, as a method, or around another."""
    more = {"z": draw.choice((0.0, 0.1)), "power": draw.choice((0.0, 1.5))}

    class Own:
        def method(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return weighed(*args, **kwargs, **more)

    @functools.wraps(weighed)
    def around(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * weighed(*args, **kwargs, **more)

    kind = draw.choice(("partial", "method", "around"))
    if kind == "method":
        dfa_hf.sums_tokens(Own.method)
        return Own().method
    return dfa_hf.sums_tokens(functools.partial(weighed, **more) if kind == "partial" else around)


def marked(rank: int, world_size: int) -> None:
    draw = random.Random(7)
    for _ in range(8):
        length, own = draw.randrange(9, 30), drawn(draw)
        whole = text(draw.choice((1, 2)), length, seed=draw.randrange(99), unlabelled=draw.randrange(length // 2))
        want, model = build("Llama").double(), dfa_hf.distribute_attention(build("Llama").double())
        want.loss_function = model.loss_function = own
        loss = want(**whole).loss
        loss.backward()
        got = model(**whole).loss
        got.backward()
        assert_loss(got, loss.detach(), str(own), 1e-7)
        assert_gradients(model, gradients(want), str(own), 1e-6)


def refused(rank: int, world_size: int) -> None:
    from transformers.loss import loss_utils

    dfa_hf.sums_tokens(weighed)
    whole = text(1, 17, seed=1)

    def of_class(model: Any) -> None:
        own = {"loss_function": lambda self, *args, **kwargs: weighed(*args, **kwargs)}
        model.__class__ = type("Other", (type(model),), own)

    @functools.wraps(weighed)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        return weighed(*args, **kwargs) + 1

    def patched(logits: Any, labels: Any, vocab_size: int, **more: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    patched.__name__ = patched.__qualname__ = "ForCausalLMLoss"
    ways: list[tuple[str, Callable[[Any], Any]]] = [
        ("weighed", lambda model: setattr(model, "loss_function", wrapped)),
        ("partial", lambda model: setattr(model, "loss_function", functools.partial(weighed, z=1.0))),
        ("partial", lambda model: setattr(model, "_loss_function", functools.partial(loss_utils.ForCausalLMLoss))),
        ("lambda", lambda model: setattr(model, "loss_function", lambda *args, **kwargs: args[0].sum())),
        ("ForMaskedLMLoss", lambda model: setattr(model, "loss_type", "ForMaskedLM")),
        ("ForTokenClassification", lambda model: setattr(model, "loss_type", "ForTokenClassification")),
        ("lambda", of_class),
    ]
    for tile in ("off", 5):
        for said, change in ways if tile == "off" else ways[4:6]:
            model = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(loss_tile=tile))
            change(model)
            with pytest.raises(UnsupportedError, match=f"labels for the loss function .*{said}.*sums_tokens marks"):
                model(**whole)
            # What works: the logits, and our loss of them.
            loss = dfa_hf.causal_lm_loss(model(input_ids=whole["input_ids"]).logits, whole["labels"])
            assert_loss(loss, build("Llama")(**whole).loss.detach(), said)
    model = dfa_hf.distribute_attention(build("Llama"))
    with pytest.raises(UnsupportedError, match="ignore_index=0 in a call"):
        model(**whole, ignore_index=0)
    with pytest.MonkeyPatch.context() as patch:  # as packages of faster losses do
        patch.setattr(loss_utils, "ForCausalLMLoss", patched)
        patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", patched)
        with pytest.raises(UnsupportedError, match="labels for the loss function ForCausalLMLoss"):
            model(**whole)
    model.loss_type = "ForOdours"  # which transformers takes for its causal one
    model(**whole)


def disagreed(rank: int, world_size: int) -> None:
    head, labels = torch.nn.Linear(8, 5).double(), torch.arange(4 * world_size)[None] % 5
    hidden = torch.randn(1, 4, 8).double()
    for name, given in {"label_smoothing": {"label_smoothing": 0.1}, "ignore_index": {"ignore_index": 3}}.items():
        odd: dict[str, Any] = given if rank == 1 else {}
        with pytest.raises(DisagreementError, match=f"{name}: .* on rank 1"):
            dfa_hf.causal_lm_loss(head(hidden), labels, **odd)
    with pytest.raises(DisagreementError, match=r"ignore_index: .* on rank 1"):
        tiled_loss(head, hidden, labels, **odd)
    with pytest.raises(IndexError if rank == 1 else DisagreementError, match="is out of bounds"):
        dfa_hf.causal_lm_loss(head(hidden), labels + 100 * (rank == 1))
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="a tile is a number of tokens"):
        tiled_loss(head, hidden, labels, tile=int(rank != 1))
    dfa_hf.causal_lm_loss(head(hidden), labels)
    with pytest.raises(DisagreementError, match=r"of labels \(1, 11\) on rank 1"):
        dfa_hf.causal_lm_loss(head(hidden), labels[:, int(rank == 1) :])


def test_a_marked_loss_is_that_of_one_process_and_another_is_refused_however_it_was_set() -> None:
    run_each(3, marked, refused, disagreed, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_has_the_dtype_that_it_is_computed_in(dtype: torch.dtype) -> None:
    head, labels = torch.nn.Linear(8, 5, bias=False, dtype=dtype), torch.randint(5, (1, 7))
    hidden = torch.randn(1, 7, 8, dtype=dtype)
    for loss in (dfa_hf.causal_lm_loss(head(hidden), labels), tiled_loss(head, hidden, labels, tile=3)):
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


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


def test_a_forward_that_makes_the_loss_itself_must_take_shifted_labels_and_none_that_are_smoothed() -> None:
    model, batch = dfa_hf.distribute_attention(build("Llama")), text(1, 9, seed=1)
    want = model(**batch).loss

    def forward(
        self: Any, labels: Any, shift_labels: Any, num_items_in_batch: float, own: bool = False, **rest: Any
    ) -> Any:
        logits = self.lm_head(self.model(**rest).last_hidden_state)
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:] if own else shift_labels
        return {"loss": F.cross_entropy(logits[0], labels[0], reduction="sum") / num_items_in_batch}

    model.forward = MethodType(forward, model)
    torch.testing.assert_close(model(**batch)["loss"], want)
    with pytest.raises(ValueError, match="batch_size"):
        model(**batch, own=True)
    model.loss_function = functools.partial(causal_loss, label_smoothing=0.1)
    with pytest.raises(UnsupportedError, match="label smoothing with a LlamaForCausalLM whose forward makes the loss"):
        model(**batch)


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
