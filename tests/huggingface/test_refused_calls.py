"""What a batch or a call of a prepared model asks for and would not get is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron import masks
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.tree import Tree
from tests.huggingface.rows import GEMMA4
from tests.huggingface.sweep import images
from tests.support.models import build, text
from tests.support.workers import run_each

pytestmark = pytest.mark.support("models", "models that are not supported are refused")

BATCH = text(1, 8, seed=0)
IDS, LABELS = BATCH["input_ids"], BATCH["labels"]
ONES = torch.ones(1, 8, dtype=torch.long)
PLACES = torch.arange(8)[None]
LEFT, RIGHT = (PLACES > 0).long(), (PLACES < 7).long()
TREE = {"prompt_tree": ([4, 2, 2], [-1, 0, 0])}


def offsets(*places: int) -> dict[str, torch.Tensor]:
    return {"cu_seq_lens_q": torch.tensor(places)}


def places(*found: int) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.tensor([found])}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("padding that is not on the right", {"attention_mask": LEFT}),
    ("labels of padded tokens", {"labels": ONES, "attention_mask": RIGHT}),
    ("labels of padded tokens", {"shift_labels": ONES, "attention_mask": RIGHT}),
    ("ready-made attention mask", {"attention_mask": torch.ones(1, 1, 8, 8)}),
    ("position_ids from 0 to 8", places(0, 1, 2, 3, 5, 6, 7, 8)),
    ("position_ids from 8 to 15", {"position_ids": PLACES + 8}),
    ("not those of documents", places(0, 1, 2, 3, 4, 5, 6, 9)),
    ("not those of documents", places(3, 4, 0, 1, 2, 3, 4, 5)), ("not those of doc", places(0, 1, 2, 1, 2, 3, 4, 5)),
    ("cu_seq_lens_q from 0 to 7", offsets(0, 4, 7)), ("cu_seq_lens_q from 0 to 9", offsets(0, 4, 9)),
    ("cu_seq_lens_q from 0 to 8", offsets(0, 6, 4, 8)),
    ("cu_seq_lens_k other than cu_seq_lens_q", offsets(0, 4, 8) | {"cu_seq_lens_k": torch.tensor([0, 5, 8])}),
    ("disagree", offsets(0, 4, 8) | {"position_ids": PLACES}), ("a key cache", {"use_cache": True}),
    ("a key cache", {"past_key_values": object()}), ("a key cache", {"cache": object()}),
    ("output_attentions", {"output_attentions": True}), ("position_bias", {"position_bias": torch.zeros(1, 4, 8, 8)}),
    ("odours beside the tokens of a batch", {"odours": torch.ones(1, 8)}),
    ("weights beside the tokens of a batch", {"weights": torch.ones(1, 8)}),
    ("times beside the tokens of a batch", {"times": torch.ones(8)}),
    ("mm_token_type_ids beside the tokens of a batch", {"mm_token_type_ids": ONES}),
    (r"for models with axes \(4, batch, seq\), these first", {"position_ids": PLACES.expand(3, 1, -1)}),
    ("position_ids that are not those of documents, or of a tree", TREE | {"position_ids": PLACES}),
    ("position_ids from 0 to 7", TREE | {"position_ids": PLACES}),
    ("a mask that does not fit: it is of type str", {"mask": "causal"}),
    ("a mask that does not fit: it is of type Tree", {"mask": Tree((8,), (-1,))}),
    ("a prompt_tree that does not fit: 'int' object is not iterable", {"prompt_tree": [4, 4]}),
    ("a prompt_tree or mask of 6 tokens with rows of 8", {"prompt_tree": ([4, 2], [-1, 0])}),
    ("a prompt_tree beside mask", TREE | {"mask": masks.causal(8)}),
    ("3 segments need as many parents", {"prompt_tree": ([4, 2, 2], [-1, 0])}),
    ("a mask beside padding", {"mask": masks.prefix_lm(8, 3), "attention_mask": RIGHT}),
    ("the same in all rows of a mask", {
        "input_ids": IDS.expand(2, -1), "mask": masks.prefix_lm(8, 3), "position_ids": torch.cat((PLACES, PLACES % 4)),
    }),
]  # fmt: skip


OTHERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("a mask.*with a state", ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1}), {
        "input_ids": IDS, "mask": masks.prefix_lm(8, 3),
    }),
    ("logits_to_keep in a model whose layers share keys", GEMMA4, {"input_ids": IDS, "logits_to_keep": 3}),
    ("several axes", "qwen2_5_vl", {"input_ids": IDS, "position_ids": PLACES, "pixel_values": torch.ones(1, 2)}),
    ("cross_attention_states beside the tokens", "qwen3_vl", {"cross_attention_states": torch.zeros(1, 3, 32)}),
    (r"position_ids of shape \(1, 40\) for inputs_embeds", "qwen3_vl", {"position_ids": torch.arange(40)[None]}),
    (r"position_ids of shape \(2, 40\) for inputs_embeds", "qwen3_vl", {"prompt_tree": ([30, 10], [-1, 0])}),
    ("inputs_embeds, or no input_ids", "qwen3_vl", {
        "input_ids": None, "inputs_embeds": torch.zeros(1, 40, 32).double(),
    }),
    ("images whose tokens see each other, under a mask or over several", "gemma3", {"prompt_tree": ([5, 35], [-1, 0])}),
]  # fmt: skip


def with_images(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model of several parts, distributed, and a batch for it."""
    model = images.build(kind)
    batch = images.add_images(model, kind, {name: x.clone() for name, x in text(2, 40, seed=0).items()})
    return dfa_hf.distribute_attention(model), batch


EVERY = [*((message, ("Llama", {}), {"input_ids": IDS} | arguments) for message, arguments in CALLS), *OTHERS]


@pytest.mark.parametrize(("message", "kind", "arguments"), EVERY, ids=[message for message, *_ in EVERY])
def test_a_call_that_asks_for_more_is_refused(message: str, kind: Any, arguments: dict[str, Any]) -> None:
    if isinstance(kind, str):
        model, batch = with_images(kind)
        batch = {name: x for name, x in (batch | arguments).items() if x is not None and name != "labels"}
        batch = arguments if kind == "qwen2_5_vl" else batch
    else:
        model, batch = dfa_hf.distribute_attention(build(kind[0], **kind[1])), arguments
        model(input_ids=IDS, attention_mask=torch.ones(1, 8), position_ids=PLACES)
    with pytest.raises(UnsupportedError, match=message):
        model(**batch)


ODD_MASKS = (
    torch.tensor([[1, 1, 2, 2, 3, 3, 3, 0]]), torch.tensor([[1, 1, 1, 1, 1, 1, 1, 2]], dtype=torch.uint8),
    torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, -float("inf")]]), torch.tensor([[1.0, 1, 1, 1, 1, 1, 0.5, 0]]),
    torch.tensor([[1, 1, 1, 1, 1, 1, -1, 0]]), torch.full((1, 8), float("nan")),
)  # fmt: skip


@pytest.mark.parametrize("packed", [{}, {"position_ids": torch.tensor([[0, 1, 0, 1, 0, 1, 2, 3]])}])
def test_a_mask_of_other_values_than_0_and_1_is_refused_in_every_way_in(packed: dict[str, torch.Tensor]) -> None:
    message = "attention_mask with other values than 0 and 1.*position_ids that begin at 0 in each document"
    model = dfa_hf.distribute_attention(build("Llama"))
    for called in (model, model.model):
        for mask in ODD_MASKS:
            with pytest.raises(UnsupportedError, match=message):
                called(input_ids=IDS, attention_mask=mask, **packed)
    for dtype in (torch.float32, torch.bool, torch.uint8):
        model(input_ids=IDS, attention_mask=ONES.to(dtype), **packed)


def test_a_mask_that_the_model_makes_itself_is_refused() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))

    def masked(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": RIGHT.bool()}

    model.model.register_forward_pre_hook(masked, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match="an attention_mask with padding"):
        model(input_ids=IDS)


def test_a_forward_that_is_called_without_the_hooks_of_its_model_is_refused() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM\.forward of a distributed model, called directly"):
        model.forward(input_ids=IDS, labels=IDS)
    model.model(input_ids=IDS)
    with dfa_hf.local_attention(model):
        assert torch.equal(model.forward(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_model_that_was_only_switched_by_name_says_what_is_missing() -> None:
    dfa_hf.distribute_attention(build("Llama"))  # transformers knows the name now
    model = build("Llama")
    model.set_attn_implementation(dfa_hf.NAME)
    with pytest.raises(UnsupportedError, match="distribute_attention"):
        model(input_ids=IDS)
    model = dfa_hf.distribute_attention(model)
    with dfa_hf.local_attention(model), pytest.raises(UnsupportedError, match="a model with its own attention"):
        model(input_ids=IDS, **TREE)


def call_on_two_ranks(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    half = slice(4 * rank, 4 * rank + 4)
    differ = r"batches that differ between the ranks.*(\n    rank [01]: 1 x \d tokens, number [0-9a-f]{8}){2}"
    cut = {name: x[:, half] for name, x in BATCH.items()}
    for part in (cut, cut | {"shift_labels": cut["labels"]}, cut | {"position_ids": PLACES[:, half]}):
        with pytest.raises((UnsupportedError, DisagreementError), match=f"{differ}|refuses|position_ids from 4"):
            model(**part)
    one_sided: list[tuple[str, dict[str, Any]]] = [
        ("labels of shape", {"labels": LABELS[:, half] if rank else LABELS}),
        ("other values than", {"attention_mask": torch.ones(1, 8) + rank}),
    ]
    for words, arguments in one_sided:
        with expected(rank, words):
            model(input_ids=IDS, **arguments)
    both: list[tuple[str, dict[str, Any]]] = [
        ("image_pixel_values beside the tokens.*with images or sound, distribute_attention of the whole", {
            "input_ids": IDS, "image_pixel_values": torch.ones(1, 3, 4, 4),
        }),
        (r"num_items_in_batch of torch\.bfloat16", {**BATCH, "num_items_in_batch": torch.tensor(8).bfloat16()}),
        (differ, {"inputs_embeds": model.get_input_embeddings()(IDS) + rank}),
        (r"inputs_embeds of 1\.5 GiB.*What works: input_ids", {
            "inputs_embeds": torch.empty(1, 3 * 2**22, 32, device="meta"),
        }),
        ("a call without tokens", {"labels": LABELS}), ("rows of 1 tokens on 2 ranks", text(1, 1, seed=0)),
    ]  # fmt: skip
    for words, arguments in both:
        with pytest.raises(UnsupportedError, match=words):
            model(**arguments)
    want = model(**BATCH)
    with pytest.raises(UnsupportedError, match=r"labels of shape \(1, 4\) for \(1, 4\) tokens on each of 2 ranks"):
        dfa_hf.causal_lm_loss(want.logits, LABELS[:, half])
    shifted = torch.nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100)
    alike = (
        _positional(model, IDS, position_ids=PLACES, labels=LABELS),
        model(**BATCH, shift_labels=shifted),
        model(**BATCH, num_items_in_batch=(shifted != -100).sum()),
        model(inputs_embeds=model.get_input_embeddings()(IDS), labels=LABELS),
    )
    assert all(torch.equal(found.loss, want.loss) for found in alike)
    model(**BATCH, num_items_in_batch=torch.tensor(5), use_cache=False, step=torch.tensor(3))
    model.model.register_forward_pre_hook(_later_positions, with_kwargs=True, prepend=True)
    with pytest.raises(UnsupportedError, match="position_ids from 1 to 8"):
        model(input_ids=IDS)


def expected(rank: int, words: str) -> Any:
    """The second rank is refused by its own words, and the first one hears of it."""
    own, words = (UnsupportedError, words) if rank else (DisagreementError, "rank 1 of the group refuses")
    return pytest.raises(own, match=words)


def _later_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model that makes positions of its own."""
    return args, kwargs | {"position_ids": PLACES + 1}


def _positional(model: Any, tokens: torch.Tensor, **named: torch.Tensor) -> Any:
    """A call without a keyword."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    last = max(names.index(name) for name in named)
    return model(tokens, *(named.get(name) for name in names[1 : last + 1]))


def images_on_two_ranks(rank: int, world_size: int) -> None:
    model, batch = with_images("llava")
    cut = {"input_ids": batch["input_ids"].tensor_split(world_size, 1)[rank], "pixel_values": batch["pixel_values"]}
    alone = {"input_ids": batch["input_ids"]} | ({"pixel_values": batch["pixel_values"]} if rank else {})
    for given in (cut, alone):
        with pytest.raises(UnsupportedError, match="batches that differ between the ranks"):
            model(**given)
    batch["labels"][:, 30:] = -100
    batch["attention_mask"] = (torch.arange(40) < 30).long().expand(2, 40)
    assert model(**batch).logits.shape[1] == 20
    with pytest.raises(UnsupportedError, match="padding that is not on the right"):
        model(input_ids=batch["input_ids"], attention_mask=1 - batch["attention_mask"])
    next(model.parameters()).grad_sample = None  # as Opacus has it
    with pytest.raises(UnsupportedError, match="gradients of single rows"):
        model(**batch)


def test_on_two_ranks_parts_and_what_does_not_fit_are_refused_and_whole_batches_told_in_any_way_are_not() -> None:
    run_each(2, call_on_two_ranks, images_on_two_ranks, timeout=120)
