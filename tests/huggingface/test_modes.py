"""Whether attention is distributed belongs to a forward: its recompute, and other models, do not change it."""

from __future__ import annotations

import copy
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import checkpointing
from dfa_megatron.sharding import shard_sequence, unshard_sequence
from tests.frameworks.compare import gradients_of
from tests.fuzz.frameworks.steps import check_each
from tests.huggingface import rows
from tests.huggingface.one_process import assert_same, total_loss
from tests.support.close import assert_close
from tests.support.models import build, gradients, text, with_noise
from tests.support.workers import over_ranks, run_each

PACK = text(1, 12, seed=3) | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])}


def of_double(checkpoint: str = "none", reentrant: bool = False, kind: str = "Llama") -> Any:
    options = TrainingConfig(checkpoint=checkpoint)
    return dfa_hf.distribute_attention(build(kind).double(), config=options, reentrant=reentrant)


@pytest.mark.support("models", "rematerialization")
def test_what_runs_between_a_forward_and_its_backward_changes_nothing() -> None:
    check_each("transformers", rows.interrupted())


def local_forward(rank: int, world_size: int) -> None:
    """A local forward in training, whose backward comes when attention is distributed again, and the other way."""
    whole = text(1, 12, seed=3)
    want = build("Llama").double()
    want(**whole).loss.backward()
    for reentrant in (True, False):
        model = of_double("full", reentrant)
        with dfa_hf.local_attention(model):
            loss = model(**whole).loss
        model(**whole)
        loss.backward()
        assert_same(gradients(model), gradients(want), "local", 1e-6)
        model.zero_grad()
        loss = model(**whole).loss
        with dfa_hf.local_attention(model):
            loss.backward()
        found = {name: gradient / world_size for name, gradient in gradients_of(model, None).items()}
        assert_same(found, gradients(want), "distributed", 1e-6)


def shared_config(rank: int, world_size: int) -> None:
    """Two models of one config object, and a third of the first one's."""
    whole, config = text(1, 12, seed=3), build("Llama").config
    before = copy.deepcopy(config.to_dict()), config._attn_implementation
    kind = type(build("Llama"))
    first, second = (kind(config).double() for _ in range(2))
    for model in (first, second):
        model.load_state_dict(build("Llama").state_dict())
    want = build("Llama").double()(**whole).loss
    dfa_hf.distribute_attention(first)
    assert_close(second(**whole).loss, want, tolerance=1e-6, name="the other model, as it was")
    dfa_hf.distribute_attention(second, config=TrainingConfig(checkpoint="full"), reentrant=True)
    third = kind(first.config).double()
    third.load_state_dict(second.state_dict())
    dfa_hf.distribute_attention(third)
    second(**whole).loss.backward()
    once = gradients_of(second, None)
    second.zero_grad()
    loss = second(**whole).loss
    first.eval()
    with torch.no_grad(), dfa_hf.local_attention(first):
        first(**text(1, 10, seed=7))
    loss.backward()
    assert_same(gradients_of(second, None), once, "after the other's evaluation", 1e-12)
    for model in (first, second, third):
        with dfa_hf.local_attention(model):
            assert_close(model(**whole).loss, want, tolerance=1e-6, name="local")
    assert (config.to_dict(), config._attn_implementation) == before


def called_alone(rank: int, world_size: int) -> None:
    model = of_double()
    inputs = {"input_ids": text(1, 12, seed=3)["input_ids"]}
    want = model.model(**inputs).last_hidden_state
    model.eval()
    assert torch.equal(model.model(**inputs).last_hidden_state, want)
    with dfa_hf.local_attention(model):
        local = model.model(**inputs).last_hidden_state
    assert_close(want, shard_sequence(local), tolerance=1e-6, name="the decoder alone, in evaluation")


def own_checkpoint(model: Any) -> Any:
    for layer in model.model.layers:

        def forward(*args: Any, own: Any = layer.forward, **kwargs: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(functools.partial(own, **kwargs), *args, use_reentrant=True)

        layer.forward = forward
    return model


def two_models(rank: int, world_size: int) -> None:
    """Two models at once, whose layers PyTorch's wrapper checkpoints, as the options of FSDP do."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    whole = text(1, 12, seed=3)
    wanted = []
    for kept, form in ((None, None), ("none", CheckpointImpl.REENTRANT), ("auto", CheckpointImpl.NO_REENTRANT)):
        models = [of_double(kept or "none", kind=kind) for kind in ("Llama", "Qwen3")]
        for model in models if kept else ():
            wrapped = [checkpoint_wrapper(layer, checkpoint_impl=form) for layer in model.model.layers]
            model.model.layers = torch.nn.ModuleList(wrapped)
        losses = [model(**batch).loss for model, batch in zip(models, (PACK, whole), strict=True)]
        for loss in losses:
            loss.backward()
        wanted.append([gradients_of(model, None) for model in models])
    for found in wanted[1:]:
        for each, want in zip(found, wanted[0], strict=True):
            mine = {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in each.items()}
            assert_same(mine, want, "two models", 1e-12)
    model = own_checkpoint(dfa_hf.distribute_attention(build("Llama")))
    with pytest.raises(UnsupportedError, match=r"a layer of type .*Attention outside of a call of its distributed"):
        model(**whole).loss.backward()


def evaluated(rank: int, world_size: int) -> None:
    """Evaluation is distributed, and generation local."""
    batch = text(1, 10 * world_size, seed=7)
    model = build("Llama", seed=7).eval()
    with torch.no_grad():
        want = model(**batch).logits
        generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        dfa_hf.distribute_attention(model)
        got = model(**batch)
        assert got.past_key_values is None
        for options in ({}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True}):
            with pytest.raises(UnsupportedError, match=r"as model\.generate asks for.*within .*local_attention"):
                model.generate(batch["input_ids"], max_new_tokens=4, **options)
        assert_close(unshard_sequence(got.logits), want, tolerance=1e-5, name="evaluation")
        with dfa_hf.local_attention(model):
            assert_close(model(**batch).logits, want, tolerance=0.0, name="local attention")
            assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), generated)
        assert_close(unshard_sequence(model(**batch).logits), want, tolerance=1e-5, name="evaluation again")


def test_a_forward_keeps_its_attention_whatever_runs_or_is_set_before_its_backward() -> None:
    """Other modes, models of one config, decoders alone, evaluation."""
    run_each(3, local_forward, shared_config, called_alone, two_models, evaluated, timeout=170)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_in_another_thread_has_its_documents(reentrant: bool) -> None:
    found = []
    for checkpoint in ("none", "full"):
        model = of_double(checkpoint, reentrant and checkpoint != "none")
        loss = model(**PACK).loss
        model(**text(1, 12, seed=4))
        ThreadPoolExecutor(1).submit(loss.backward).result()
        found.append(gradients(model))
    assert_same(found[1], found[0], "in another thread", 1e-12)


@over_ranks(2, timeout=150)
def test_layers_that_are_compiled_change_nothing_and_a_compiled_model_hears_why_not(rank: int, ranks: int) -> None:
    want, model = build("Llama").double(), of_double("remat")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for batch in (text(1, 12, seed=3), PACK):
        want.zero_grad()
        model.zero_grad()
        _, loss, count = total_loss(want, batch)
        (loss / count).backward()
        model(**batch).loss.backward()
        found = {name: gradient / ranks for name, gradient in gradients_of(model, None).items()}
        assert_same(found, gradients(want), "layers", 1e-6)
    whole = torch.compile(of_double(), backend="eager")
    with pytest.raises(UnsupportedError, match=r"a mask beyond causal.*not compiled, or layer by layer"):
        whole(**text(1, 12, seed=3))


@over_ranks(2, timeout=150)
def test_layers_in_wrappers_that_hand_attributes_on_are_run_again_in_their_forward(rank: int, ranks: int) -> None:
    sharded = functools.partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    want = build("Llama").double()
    _, loss, count = total_loss(want, PACK)
    (loss / count).backward()
    for wrap in (sharded, functools.partial(torch.compile, backend="eager")):
        model = of_double("remat")
        model.model.layers = torch.nn.ModuleList(map(wrap, model.model.layers))
        model(**PACK).loss.backward()
        for name in ("model.norm.weight", "model.embed_tokens.weight"):  # no layer's shard
            found = model.get_parameter(name).grad / ranks
            dist.all_reduce(found)
            assert_close(found, want.get_parameter(name).grad, tolerance=1e-6, name=name)


def test_checkpoints_that_run_attention_twice_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing._say_twice.cache_clear()
    model = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(checkpoint="none"))
    model.gradient_checkpointing_enable()
    for _ in range(2):
        model(**text(1, 12, seed=0)).loss.backward()
    assert caplog.text.count("checkpoint='none' runs their attention twice") == 1


def test_no_number_depends_on_the_default_dtype() -> None:
    found, batch = [], text(2, 120, seed=1)  # of more tokens than bfloat16 counts
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        model = dfa_hf.distribute_attention(build("Mixtral", output_router_logits=True, num_local_experts=2))
        torch.set_default_dtype(dtype)
        try:
            out = model(**batch)
            out.loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append({"loss": out.loss, "aux_loss": out.aux_loss} | gradients(model))
        assert all(torch.equal(value, found[0][name]) for name, value in found[-1].items()), dtype


def test_a_copy_of_a_model_is_distributed_as_well() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    batch = text(1, 8, seed=1)
    other = copy.deepcopy(model)
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    dfa_hf.distribute_attention(other, config=TrainingConfig(checkpoint="remat"))  # once more: hooks are not doubled
    assert len(other.model._forward_pre_hooks) == 1
    assert torch.equal(other(**batch).loss, model(**batch).loss)


def test_a_decoder_belongs_to_one_distributed_model_or_a_call_says_so() -> None:
    model, other = dfa_hf.distribute_attention(build("Llama")), classifier("Llama", None)
    want, other.model = model(**PACK).loss, model.model
    with pytest.raises(UnsupportedError, match="around a decoder that is distributed already"):
        dfa_hf.distribute_attention(other)
    dfa_hf.distribute_attention(model.model)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM whose decoder was replaced, or distributed"):
        model(**PACK)
    assert torch.equal(dfa_hf.distribute_attention(model)(**PACK).loss, want)


HEADS = (None, {}, {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, {"target_modules": ["q_proj", "score"]})


def classifier(kind: str, head: dict[str, Any] | None, *, first: bool = True) -> Any:
    """A classifier, whose head is replaced, or gets PEFT's copy or adapter, before or after it is distributed."""
    peft, transformers = map(pytest.importorskip, ("peft", "transformers"))
    model = getattr(transformers, f"{kind}ForSequenceClassification")(build(kind, pad_token_id=0, num_labels=3).config)
    model = model if first else dfa_hf.distribute_attention(model)
    if head:
        model = peft.get_peft_model(model, peft.LoraConfig(**head))
    elif head is not None:
        model.score = torch.nn.Linear(model.config.hidden_size, 3, bias=False)
    return with_noise(model)


def classes(seed: int, longest: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(11) < torch.arange(longest - 3, longest + 1)[:, None]).long()  # the last may be any rank's
    ids = text(4, 11, seed)["input_ids"].clamp(min=1)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.arange(4) % 3}


@over_ranks(2, timeout=150)
def test_scores_are_of_whole_rows_whatever_becomes_of_the_head(rank: int, ranks: int) -> None:
    for kind, head in itertools.product(("Llama", "Mixtral"), HEADS):
        want, later = classifier(kind, head), classifier(kind, head, first=False)
        with pytest.raises(IndexError):
            later(input_ids=torch.full((1, 11), 99))
        models = dfa_hf.distribute_attention(classifier(kind, head)), later, copy.deepcopy(later)
        for model, longest in itertools.product(models, (4, 11)):
            found, wanted = (each(**classes(longest, longest)) for each in (model, want))
            assert_close(found.logits, wanted.logits, tolerance=2e-5, name=f"{kind} {head}")
            model.zero_grad()
            want.zero_grad()
            torch.autograd.backward((found.loss / ranks, wanted.loss))
            assert_same(gradients_of(model, None), gradients(want), f"{kind} {head}", 2e-5)
            with dfa_hf.local_attention(model):
                found, wanted = (each(**classes(rank, 5 + rank)).logits for each in (model, want))
            assert_close(found, wanted, tolerance=2e-5, name=f"{kind} {head}, alone")
