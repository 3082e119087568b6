"""Encoder-decoder models over ranks: logits, loss and every gradient are those of one process, for any two lengths."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checks.check_model import check_model
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.compared import assert_loss, summed
from tests.support.close import assert_close
from tests.support.models import gradients, with_noise
from tests.support.workers import run_ranks

VOCABULARY, SOUND = 61, 15
KINDS = ("Bart", "MBart", "PLBart", "Marian", "Pegasus", "BlenderbotSmall", "Blenderbot", "M2M100", "Whisper")


def tiny(kind: str, **changes: Any) -> Any:
    """A model of float64 with eager attention, the same on every rank."""
    import transformers

    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIZES.items()}
    own = {"max_source_positions": SOUND, "num_mel_bins": 6} if kind == "Whisper" else {}
    rates = dict.fromkeys((*DROPPED, "encoder_layerdrop", "decoder_layerdrop"), 0.0)
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    whole = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "attn_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**(whole | tokens | sizes | rates | own | changes))
    name = f"{kind}MTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    return with_noise(getattr(transformers, name)(config)).double().train()


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}
DROPPED = ("dropout", "attention_dropout", "activation_dropout")


def batch_of(kind: str, source: int, target: int, padded: int = 0) -> dict[str, torch.Tensor]:
    """Two rows; the second has `padded` tokens of padding in the encoder, and labels of the last rank alone."""
    generator = torch.Generator().manual_seed(source * target)
    ids = torch.randint(4, VOCABULARY, (2, source), generator=generator)
    labels = torch.randint(4, VOCABULARY, (2, target), generator=generator)
    decoder = torch.nn.functional.pad(labels, (1, 0), value=2)[:, :-1]
    labels[1, :-2] = -100
    labels[0, 1 : target // 2] = -100
    given = {"labels": labels, "decoder_input_ids": decoder}
    if kind == "Whisper":
        return given | {"input_features": torch.randn(2, 6, 2 * SOUND, generator=generator, dtype=torch.float64)}
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -padded:] = 0
        ids[1, -padded:] = 1
    return given | {"input_ids": ids, "attention_mask": mask}


def compared(kind: str, model: Any, reference: Any, batch: dict[str, torch.Tensor]) -> None:
    reference.zero_grad()
    want = reference(**batch)
    want.loss.backward()
    model.zero_grad()
    got = model(**batch)
    got["loss"].backward()
    assert_close(got.logits, shard_sequence(want.logits), tolerance=1e-12, name=f"{kind} logits")
    assert_loss(got.loss, want.loss, kind, 1e-12)
    found = summed(model)
    for name, wanted in gradients(reference).items():
        mean = found[name] / dist.get_world_size()
        if name.endswith("k_proj.bias"):  # scores of all keys move together, so that softmax does not depend on it
            assert max(mean.abs().max(), wanted.abs().max()) < 1e-13, f"{kind} {name}"
        else:
            assert_close(mean, wanted, tolerance=1e-12, name=f"{kind} {name}")


def over_ranks(rank: int, world_size: int) -> None:
    for number, kind in enumerate(KINDS if world_size % 2 else KINDS[:1]):
        model = tiny(kind)
        reference = copy.deepcopy(model)
        checkpoint = ("none", "full", "remat")[number % 3]
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=checkpoint))
        if number == 0:
            compared(kind, model, reference, batch_of(kind, 6 * world_size, 4 * world_size))
        compared(kind, model, reference, batch_of(kind, 7 * world_size + 1, 5 * world_size - 1, padded=9))


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_and_gradients_are_those_of_one_process(world_size: int) -> None:
    run_ranks(world_size, over_ranks, timeout=170)


def refused_and_local(rank: int, world_size: int) -> None:
    """What is refused, on every rank, and that a model generates with its former attention."""
    model, batch = tiny("Bart"), batch_of("Bart", 6, 4)
    with dfa_hf.local_attention(dfa_hf.distribute_attention(model)):
        model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False)
    other = batch | {"input_ids": batch["input_ids"] + rank}
    without = {name: x for name, x in batch.items() if name not in ("decoder_input_ids", "labels")}
    left = batch | {"attention_mask": torch.ones(2, 6).index_fill_(1, torch.tensor([0]), 0)}
    for given, match in (
        (other, "batches that differ between the ranks"),
        (without, "no decoder_input_ids"),
        (left, "padding that is not on the right"),
        ({name: x[:, :1] for name, x in batch.items()}, "rows of 1 tokens on 2 ranks"),
        (batch | {"use_cache": True}, "use_cache for an encoder-decoder"),
        (batch | {"decoder_position_ids": batch["labels"]}, "decoder_position_ids for an encoder-decoder"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            model(**given)
    for stack in (model.model.encoder, model.model.decoder):
        with pytest.raises(UnsupportedError, match="coder of an encoder-decoder model that is called alone"):
            stack(batch["input_ids"])
    del batch["decoder_input_ids"]  # made of whole labels, by the model's own function
    compared("Bart", model, tiny("Bart"), batch)
    model.model.encoder.layers[0].register_forward_pre_hook(lambda _, args: (args[0][:, 1:], *args[1:]), prepend=True)
    with pytest.raises(UnsupportedError, match="5 tokens in the encoder, of a batch with 6"):
        model(**batch)


def test_what_is_refused_and_what_is_local() -> None:
    run_ranks(2, refused_and_local)


def test_models_are_refused_by_name() -> None:
    import transformers

    t5 = transformers.T5Config(d_model=32, d_ff=24, d_kv=8, num_layers=2, num_heads=4, vocab_size=61, dropout_rate=0)
    for model, match in (
        (
            transformers.T5ForConditionalGeneration(t5),
            "a t5 model whose attention adds a learned bias",
        ),
        (tiny("Bart", encoder_layerdrop=0.1), "encoder_layerdrop is 0.1"),
        (tiny("Whisper", apply_spec_augment=True), "apply_spec_augment is True"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            check_model(model)
    model = tiny("Bart")
    model.model.encoder.more = copy.deepcopy(model.model.encoder.layers[0].self_attn)
    with pytest.raises(UnsupportedError, match="with 3 attentions in the 2 layers of its encoder"):
        check_model(model)
    with pytest.raises(UnsupportedError, match="loss_tile with the loss function of an encoder-decoder model"):
        dfa_hf.distribute_attention(tiny("Bart"), config=TrainingConfig(loss_tile=4))
    with pytest.raises(UnsupportedError, match="a bart model under accelerate"):
        dfa_hf.distribute_attention(tiny("Bart"), accelerate=True)
