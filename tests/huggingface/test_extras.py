"""What collators and models bring beside tokens and logits is cut and put together by what it is, or refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.trainers.join_outputs import join_outputs
from dfa_megatron.sharding import unshard_sequence
from tests.huggingface.compared import assert_loss
from tests.support.close import assert_close
from tests.support.models import VOCABULARY, build, text
from tests.support.workers import run_ranks


def gpt2() -> Any:
    """A model that embeds types of tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def token_types(rank: int, world_size: int) -> None:
    length = 6 * world_size
    positions = torch.cat((torch.arange(5), torch.arange(length - 5))).expand(2, -1)
    for packed in (False, True):
        whole = text(2, length, seed=1, unlabelled=2)
        whole |= {"position_ids": positions} if packed else {}
        for types in (torch.zeros_like(whole["input_ids"]), (whole["input_ids"] % 3)):
            batch = {**whole, "token_type_ids": types}
            model = dfa_hf.distribute_attention(gpt2())
            logits = unshard_sequence(model(**batch).logits)
            if not packed:
                inputs = {name: batch[name] for name in ("input_ids", "token_type_ids")}
                assert_close(logits, gpt2()(**inputs).logits, tolerance=1e-9, name="logits")
            uneven = {name: x[:, :-1] for name, x in batch.items()}
            found = unshard_sequence(model(**uneven).logits)
            assert_close(found, logits[:, :-1], tolerance=1e-9, name="of an uneven length")
    llama = dfa_hf.distribute_attention(build("Llama"))
    loss = llama(**{**text(2, length, seed=1), "token_type_ids": types}).loss
    assert_loss(loss, build("Llama")(**text(2, length, seed=1)).loss, "text")
    with pytest.raises(UnsupportedError, match="mm_token_type_ids beside the tokens of a batch"):
        llama(**{**text(2, length, seed=1), "mm_token_type_ids": types})


def text_for_parts(rank: int, world_size: int) -> None:
    """A multimodal model is given batches of text alone, with types of tokens and without."""
    from tests.huggingface.sweep import images

    for kind, types in (("gemma3", True), ("qwen3_vl", False)):
        whole = text(2, 12, seed=2)
        more = {"token_type_ids": torch.zeros(2, 12, dtype=torch.long)} if types else {}
        model = images.build(kind)
        want = model(**whole, **more, use_cache=False)
        model = dfa_hf.distribute_attention(model)
        got = model(**{**whole, **more})
        assert_close(unshard_sequence(got.logits), want.logits, tolerance=1e-6, name=f"{kind} logits")
        assert_loss(got.loss, want.loss, kind)
    mask = (torch.arange(12) < torch.tensor([[4], [12]])).long()  # beyond windows transformers' own losses are NaN
    padded = {**whole, "attention_mask": mask, "labels": whole["labels"].where(mask.bool(), -100)}
    loss = model(**padded).loss
    with dfa_hf.local_attention(model):
        assert_loss(loss, model(**padded).loss, "padded")


def packs_of_text(rank: int, world_size: int) -> None:
    """A model that embeds axes takes packs of text alone in every way that tells documents: each is as it is alone."""
    from tests.huggingface.sweep import images

    draw = random.Random(world_size)
    ways = ("positions", "four axes", "offsets", "roots")
    for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5 with images"):
        for way in draw.sample(ways, 4):
            lengths = [draw.randrange(1, 14) for _ in range(draw.randrange(2, 5))] + [7]
            batch = text(1, sum(lengths), seed=draw.randrange(99))
            offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            batch["labels"][:, offsets[:-1].long()] = -100
            count, want = int((batch["labels"] != -100).sum()), images.build(kind)
            alone = zip(batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True)
            losses = [want(input_ids=ids, labels=labels, num_items_in_batch=count).loss for ids, labels in alone]
            torch.stack(losses).sum().backward()
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            told: dict[str, Any] = {
                "four axes": {"position_ids": positions.expand(4, 1, -1)},
                "offsets": {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets},
                "roots": {"prompt_tree": (lengths, [-1] * len(lengths))},
            }.get(way, {"position_ids": positions})
            model = dfa_hf.distribute_attention(images.build(kind))
            loss = model(**batch, **told).loss
            loss.backward()
            assert_loss(loss, torch.stack(losses).sum().detach(), f"{kind} {way}", 1e-6)
            trained = {name: x.grad for name, x in want.named_parameters() if x.grad is not None}
            for name, x in model.named_parameters():
                if name in trained:
                    dist.all_reduce(x.grad)
                    assert_close(x.grad / world_size, trained[name], tolerance=1e-5, name=f"{kind} {way} {name}")
    with pytest.raises(UnsupportedError, match=r"for models with axes \(4, batch, seq\), these first"):
        dfa_hf.distribute_attention(build("Llama"))(**batch, position_ids=positions.expand(3, 1, -1))
    image = batch | {"position_ids": positions, "pixel_values": torch.ones(1, 2)}
    with pytest.raises(UnsupportedError, match=r"position_ids of shape .*along several axes"):
        dfa_hf.distribute_attention(images.build("qwen2_5_vl"))(**image)


def extras(rank: int, world_size: int) -> None:
    whole = text(2, 12, seed=1)
    model = dfa_hf.distribute_attention(build("Llama"))
    for more in (
        {"weights": torch.ones(2, 12)},
        {"times": torch.ones(12)},
    ):
        with pytest.raises(UnsupportedError, match=f"{next(iter(more))} beside the tokens of a batch"):
            model(**whole, **more)
    model(**whole, num_items_in_batch=torch.tensor(5), use_cache=False, step=torch.tensor(3))


def joined(rank: int, world_size: int) -> None:
    local, rows = 6, 4
    model = dfa_hf.distribute_attention(build("Llama")).eval()
    join_outputs(model)

    def add(module: Any, args: Any, output: Any) -> Any:
        output["router_logits"] = (torch.full((rows * local, local), float(rank)), torch.ones(rows, local))
        output["image_hidden_states"] = torch.full((rows, local, 3), float(rank))
        return output

    handle = model.register_forward_hook(add, prepend=True)
    with torch.no_grad():
        out = model(**text(rows, local * world_size, seed=1), output_hidden_states=True)
    assert [tuple(x.shape) for x in out.router_logits] == [(rows * local, local), (rows, local)]
    assert out.image_hidden_states.shape == (rows, local, 3)
    assert out.logits.shape[:2] == out.hidden_states[0].shape[:2] == (rows, local * world_size)
    want = build("Llama").eval()(**text(rows, local * world_size, seed=1), output_hidden_states=True)
    assert_close(out.logits, want.logits, tolerance=1e-5, name="logits")
    for one, other in zip(out.hidden_states, want.hidden_states, strict=True):
        assert_close(one, other, tolerance=1e-5, name="hidden states")
    handle.remove()
    with torch.no_grad():
        logits = model(**text(rows, local * world_size, seed=1), return_dict=False)[1]
    assert_close(logits, want.logits, tolerance=1e-5, name="logits of a tuple")


def each(rank: int, world_size: int) -> None:
    for check in (token_types, text_for_parts, extras, joined):
        check(rank, world_size)


@pytest.mark.parametrize("ranks", [2, 3])
def test_types_of_tokens_text_alone_extras_and_outputs_of_any_length(ranks: int) -> None:
    """Cut with the tokens, taken by multimodal models, refused by name, and left alone."""
    run_ranks(ranks, each, timeout=150)


@pytest.mark.parametrize("ranks", [2, 3])
def test_packs_of_text_in_models_that_embed_axes_are_exact_however_they_are_told(ranks: int) -> None:
    run_ranks(ranks, packs_of_text, timeout=150)
