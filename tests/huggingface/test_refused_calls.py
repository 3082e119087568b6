"""What a batch or a call of a prepared model asks for and would not get is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext
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
    model = dfa_hf.distribute_attention(build("Llama"))
    for called in (model, model.model):
        with pytest.raises(UnsupportedError, match=message):
            called(**batch)
    for same in (torch.ones(1, 8), torch.ones(1, 8, dtype=torch.bool), torch.ones(1, 8, dtype=torch.uint8)):
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
    ("more", "message"),
    [
        ({"odours": torch.ones(1, 8)}, "odours beside the tokens of a batch"),
        ({"attention_mask": _padding(right=False)}, "padding that is not on the right"),
        ({"labels": torch.ones(1, 8), "attention_mask": _padding(right=True)}, "labels of padded tokens"),
        ({"position_ids": torch.tensor([[0, 1, 2, 1, 2, 3, 4, 5]])}, "not those of doc"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(more: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.distribute_attention(build("Llama"))(input_ids=torch.ones(1, 8, dtype=torch.long), **more)


def test_a_mask_that_the_model_makes_itself_is_refused() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    hidden = torch.arange(8)[None] < 6

    def masked(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": hidden}

    model.model.register_forward_pre_hook(masked, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match="an attention_mask that the model has made"):
        model(input_ids=text(1, 8, seed=0)["input_ids"])


def call_on_two_ranks(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    context: LayerContext = getattr(model, CONTEXT)
    assert context.size == 2
    batch = text(1, 8, seed=0)
    ids, labels = batch["input_ids"], batch["labels"]
    half = slice(4 * rank, 4 * rank + 4)
    differ = r"batches that differ between the ranks.*(\n    rank [01]: 1 x \d tokens, number [0-9a-f]{8}){2}"
    cut = {name: x[:, half] for name, x in batch.items()}
    for part in (cut, cut | {"shift_labels": cut["labels"]}, cut | {"position_ids": torch.arange(8)[None, half]}):
        with pytest.raises((UnsupportedError, DisagreementError), match=f"{differ}|refuses|position_ids from 4"):
            model(**part)
    own, words = (UnsupportedError, "labels of shape") if rank else (DisagreementError, "rank 1 of the group refuses")
    with pytest.raises(own, match=words):
        model(input_ids=ids, labels=labels[:, half] if rank else labels)
    with pytest.raises(UnsupportedError, match="image_pixel_values on 2 ranks: images and"):
        model(input_ids=ids, image_pixel_values=torch.ones(1, 3, 4, 4))
    with pytest.raises(UnsupportedError, match=r"num_items_in_batch of torch\.bfloat16"):
        model(**batch, num_items_in_batch=torch.tensor(8).bfloat16())
    own, words = (UnsupportedError, "other values than") if rank else (DisagreementError, "rank 1 of the group refuses")
    with pytest.raises(own, match=words):
        model(input_ids=ids, attention_mask=torch.ones(1, 8) + rank)
    want = model(**batch)
    whole = _positional(model, ids, position_ids=torch.arange(8)[None], labels=labels)
    assert torch.equal(whole.loss, want.loss)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(**batch, shift_labels=shifted).loss, want.loss)
    assert torch.equal(model(**batch, num_items_in_batch=(shifted != -100).sum()).loss, want.loss)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), labels=labels)
    assert torch.equal(embedded.loss, want.loss)
    with pytest.raises(UnsupportedError, match=differ):
        model(inputs_embeds=model.get_input_embeddings()(ids) + rank)
    with pytest.raises(UnsupportedError, match=r"inputs_embeds of 1\.5 GiB.*What works: input_ids"):
        model(inputs_embeds=torch.empty(1, 3 * 2**22, 32, device="meta"))
    with pytest.raises(UnsupportedError, match="a call without tokens"):
        model(labels=labels)
    with pytest.raises(UnsupportedError, match="rows of 1 tokens on 2 ranks"):
        model(**text(1, 1, seed=0))
    with pytest.raises(UnsupportedError, match=r"labels of shape \(1, 4\) for \(1, 4\) tokens on each of 2 ranks"):
        dfa_hf.causal_lm_loss(want.logits, labels[:, half])
    model.model.register_forward_pre_hook(_later_positions, with_kwargs=True, prepend=True)
    own, words = (UnsupportedError, "position_ids from") if rank else (DisagreementError, "rank 1 of the group refuses")
    with pytest.raises(own, match=words):
        model(input_ids=ids)


def _later_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model that changes the positions of its second rank."""
    return args, kwargs | {"position_ids": kwargs["position_ids"] + (kwargs["position_ids"][0, 0] > 0)}


def _positional(model: Any, tokens: torch.Tensor, **named: torch.Tensor) -> Any:
    """A call without a keyword."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    last = max(names.index(name) for name in named)
    return model(tokens, *(named.get(name) for name in names[1 : last + 1]))


def test_on_two_ranks_parts_and_what_does_not_fit_are_refused_and_whole_batches_told_in_any_way_are_not() -> None:
    run_ranks(2, call_on_two_ranks, timeout=120)
