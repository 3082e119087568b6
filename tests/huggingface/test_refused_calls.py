"""What a batch or a call of a prepared model asks for and would not get is refused by name."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext
from dfa_megatron.huggingface.trainers.shared_batches import take_whole_batches
from tests.support.models import build, text
from tests.support.workers import run_ranks

pytestmark = pytest.mark.support("models", "models that are not supported are refused")


def test_a_model_that_was_only_switched_by_name_says_what_is_missing() -> None:
    dfa_hf.distribute_attention(build("Llama"))  # transformers knows the name now
    model = build("Llama")
    model.set_attn_implementation(dfa_hf.NAME)
    with pytest.raises(UnsupportedError, match="distribute_attention"):
        model(input_ids=text(1, 8, seed=0)["input_ids"])


def _padding(right: bool) -> torch.Tensor:
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[0, -1 if right else 0] = 0
    return mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": _padding(right=False)}, "padding that is not on the right"),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, "ready-made attention mask"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])}, "position_ids from 0 to 8"),
        ({"position_ids": torch.arange(8, 16)[None]}, "position_ids from 8 to 15"),
        ({"use_cache": True}, "a key cache"),
        ({"past_key_values": object()}, "a key cache"),
        ({"cache": object()}, "a key cache"),
        ({"output_attentions": True}, "output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 7])}, "cu_seq_lens_q from 0 to 7"),
        ({"position_bias": torch.zeros(1, 4, 8, 8)}, "position_bias"),
    ],
)
def test_a_call_that_asks_for_more_is_refused(arguments: dict[str, Any], message: str) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    tokens = text(1, 8, seed=0)["input_ids"]
    model(input_ids=tokens, attention_mask=torch.ones(1, 8), position_ids=torch.arange(8)[None])
    with pytest.raises(UnsupportedError, match=message):
        model(input_ids=tokens, **arguments)


ODD_MASKS = (
    torch.tensor([[1, 1, 2, 2, 3, 3, 3, 0]]),
    torch.tensor([[1, 1, 1, 1, 1, 1, 1, 2]], dtype=torch.uint8),
    torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, -float("inf")]]),
    torch.tensor([[1.0, 1, 1, 1, 1, 1, 0.5, 0]]),
    torch.tensor([[1, 1, 1, 1, 1, 1, -1, 0]]),
    torch.full((1, 8), float("nan")),
)


@pytest.mark.parametrize("mask", ODD_MASKS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_of_other_values_than_0_and_1_is_refused_in_every_way_in(mask: torch.Tensor, packed: bool) -> None:
    ids = text(1, 8, seed=0)["input_ids"]
    batch = {"input_ids": ids, "attention_mask": mask}
    if packed:
        batch["position_ids"] = torch.tensor([[0, 1, 0, 1, 0, 1, 2, 3]])
    message = "attention_mask with other values than 0 and 1.*position_ids that begin at 0 in each document"
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.shard_batch(batch)
    model = dfa_hf.distribute_attention(build("Llama"))
    for called in (model, model.model):
        with pytest.raises(UnsupportedError, match=message):
            called(**batch)
    shared = dfa_hf.distribute_attention(build("Llama"))
    take_whole_batches(shared)
    with pytest.raises(UnsupportedError, match=message):
        shared(**batch)
    for same in (torch.ones(1, 8), torch.ones(1, 8, dtype=torch.bool), torch.ones(1, 8, dtype=torch.uint8)):
        assert dfa_hf.shard_batch(batch | {"attention_mask": same})["input_ids"].equal(ids)
        model(**batch | {"attention_mask": same})


_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}


def test_a_layer_that_names_another_window_than_its_mask_is_refused() -> None:
    model = dfa_hf.distribute_attention(build("Qwen2", **_WINDOWS))
    layers = model.model.layers
    tokens = text(1, 8, seed=0)["input_ids"]
    model(input_ids=tokens)
    layers[1].self_attn.sliding_window = 3
    with pytest.raises(
        UnsupportedError, match="sliding_window=3 in a layer of type Qwen2Attention whose mask has one of"
    ):
        model(input_ids=tokens)
    layers[1].self_attn.sliding_window = 5
    layers[0].self_attn.sliding_window = 5
    with pytest.raises(UnsupportedError, match="sliding_window=5 in a layer of type Qwen2Attention whose mask has no"):
        model(input_ids=tokens)
    model(input_ids=tokens[:, :5])  # a window that hides nothing


def test_a_sliding_layer_that_is_not_told_its_window_is_refused() -> None:
    model = dfa_hf.distribute_attention(build("Qwen2", **_WINDOWS))
    layer = model.model.layers[1].self_attn
    layer.sliding_window = None
    tokens = text(1, 8, seed=0)["input_ids"]
    model(input_ids=tokens)  # the mask tells it
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs | {"attention_mask": None})
    with pytest.raises(UnsupportedError, match="sliding_window=5 in a layer of type Qwen2Attention whose mask has no"):
        model(input_ids=tokens)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": torch.ones(1, 8)}, "it is not known how to cut it"),
        ({"input_ids": torch.ones(1, 8), "odours": torch.ones(1)}, "a batch of input_ids, odours"),
        ({"input_ids": torch.ones(1, 8), "attention_mask": _padding(right=False)}, "padding that is not on the right"),
        (
            {"input_ids": torch.ones(1, 8), "labels": torch.ones(1, 8), "attention_mask": _padding(right=True)},
            "labels of padded tokens",
        ),
        ({"input_ids": torch.ones(1, 8), "position_ids": torch.tensor([[0, 1, 2, 1, 2, 3, 4, 5]])}, "not those of doc"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.shard_batch(batch)


def cut_twice(rank: int, world_size: int) -> None:
    model, batch = dfa_hf.distribute_attention(build("Llama")), text(1, 8, seed=0)
    part = dfa_hf.shard_batch(batch)
    for again in (part, {"input_ids": part["input_ids"], "dfa_batch_number": part["dfa_batch_number"]}):
        with pytest.raises(UnsupportedError, match=r"it is a part already, .*distribute_trainer"):
            dfa_hf.shard_batch(again)
    shared = dfa_hf.distribute_attention(build("Llama"))
    take_whole_batches(shared)
    for packed in (batch, {**batch, "position_ids": torch.cat((torch.arange(5), torch.arange(11)))[None][:, :8]}):
        with pytest.raises(UnsupportedError, match="it is a part already"):
            shared(**dfa_hf.shard_batch(packed))
        shared(**packed)  # what works
    model(**part)


def call_on_two_ranks(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    context: LayerContext = getattr(model, CONTEXT)
    assert context.size == 2
    batch = text(1, 8, seed=0)
    with pytest.raises(UnsupportedError, match=r"labels without shift_labels.*or distribute_trainer where a Trainer"):
        model(**batch)
    with pytest.raises(UnsupportedError, match="labels without num_items_in_batch"):
        model(**batch, shift_labels=batch["labels"])
    with pytest.raises(UnsupportedError, match="labels without shift_labels"):
        _positional(model, batch["input_ids"], position_ids=torch.arange(8)[None], labels=batch["labels"])
    with pytest.raises(UnsupportedError, match=f"holds the tokens {8 * rank} to {8 * rank + 7}"):
        model(input_ids=batch["input_ids"], position_ids=torch.arange(8)[None] + 8 * (1 - rank))
    with pytest.raises(UnsupportedError, match=r"without position_ids on 2 ranks.*distribute_trainer"):
        model(input_ids=batch["input_ids"])
    positions = torch.arange(8 * rank, 8 * rank + 8)[None]
    with pytest.raises(UnsupportedError, match="image_pixel_values on 2 ranks: images and"):
        model(input_ids=batch["input_ids"], position_ids=positions, image_pixel_values=torch.ones(1, 3, 4, 4))
    hidden = torch.ones(1, 8)
    hidden[:, -1] = rank  # the first rank's last token, before the second's: each part alone would pass
    with pytest.raises(UnsupportedError, match="not on the right"):
        model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=hidden)
    some = {"labels": batch["input_ids"], "shift_labels": batch["input_ids"], "num_items_in_batch": torch.tensor(8)}
    with pytest.raises(UnsupportedError, match=r"num_items_in_batch of torch\.bfloat16"):
        model(**batch | some | {"num_items_in_batch": torch.tensor(8).bfloat16()}, position_ids=positions)
    with pytest.raises(UnsupportedError, match="labels of padded tokens"):  # of the last rank, and all raise
        model(**batch | some, position_ids=positions, attention_mask=torch.arange(8)[None] < 8 - rank)
    with pytest.raises(UnsupportedError, match="other values than 0 and 1"):  # on one rank, and all raise
        model(input_ids=batch["input_ids"], position_ids=positions, attention_mask=torch.ones(1, 8) + rank)
    own, words = (UnsupportedError, "labels without") if rank else (DisagreementError, "rank 1 of the group refuses")
    with pytest.raises(own, match=words):
        model(input_ids=batch["input_ids"], position_ids=positions, labels=batch["labels"] if rank else None)
    documents = torch.tensor([0, 16])
    with pytest.raises(UnsupportedError, match="position_ids from"):  # of one rank, and all raise
        model(input_ids=batch["input_ids"], position_ids=positions + rank, cu_seq_lens_q=documents)
    model.model.register_forward_pre_hook(_later_positions, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match="position_ids from"):
        model(input_ids=batch["input_ids"], position_ids=positions)
    uneven, few = (dfa_hf.shard_batch(text(1, length, seed=0)) for length in (7, 1))
    with pytest.raises(UnsupportedError, match="rows of 7 tokens without dfa_batch_number"):
        model(input_ids=uneven["input_ids"], position_ids=uneven["position_ids"])
    with pytest.raises(UnsupportedError, match="rows of 1 tokens on 2 ranks"):
        model(**few)


def _later_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model that changes the positions of its second rank."""
    return args, kwargs | {"position_ids": kwargs["position_ids"] + (kwargs["position_ids"][0, 0] > 0)}


def _positional(model: Any, tokens: torch.Tensor, **named: torch.Tensor) -> Any:
    """A call without a keyword."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    last = max(names.index(name) for name in named)
    return model(tokens, *(named.get(name) for name in names[1 : last + 1]))


def evaluate_on_two_ranks(rank: int, world_size: int) -> None:
    """Each rank alone, as in evaluation under accelerate."""
    model = dfa_hf.distribute_attention(build("Llama"), accelerate=True).eval()
    tokens = text(1, 8, seed=rank)["input_ids"]
    start = 8 * rank
    cut = {"position_ids": torch.arange(start, start + 8)[None]}
    packed = {"position_ids": torch.tensor([[start, start + 1, 0, 1, 2, 0, 1, 2]])}
    for batch in (cut, cut | {"attention_mask": torch.ones(1, 8)}, packed):
        with pytest.raises(UnsupportedError, match=r"from 8 to .* in evaluation") if rank else nullcontext():
            model(input_ids=tokens, **batch)
    with pytest.raises(UnsupportedError, match="in evaluation") if rank else nullcontext():
        _positional(model, tokens, **cut)
    with dfa_hf.local_attention(model):
        model(input_ids=tokens, **cut)
    for _ in range(rank):  # the ranks need not evaluate as much as one another
        model(input_ids=tokens, position_ids=torch.arange(8)[None])
    padded = torch.ones(1, 8, dtype=torch.long)
    padded[0, :1] = 0
    want = build("Llama").eval()
    for cache in (True, False):
        asked: dict[str, Any] = {"attention_mask": padded, "max_new_tokens": 3, "do_sample": False, "use_cache": cache}
        assert torch.equal(model.generate(tokens, **asked), want.generate(tokens, **asked))
    with pytest.raises(UnsupportedError, match="without position_ids"):
        model.train()(input_ids=tokens)


def test_a_part_of_a_sequence_in_local_evaluation_is_refused_and_generation_is_not() -> None:
    run_ranks(2, evaluate_on_two_ranks, timeout=120)


def test_on_two_ranks_labels_and_positions_of_a_whole_sequence_are_refused() -> None:
    run_ranks(2, call_on_two_ranks, timeout=120)


def test_a_part_is_not_cut_again_by_hand_or_by_a_trainers_model() -> None:
    run_ranks(2, cut_twice, timeout=120)
