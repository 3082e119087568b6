"""What collators, rollouts, images and trainers tell beside tokens: taken, put together again, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron import trees
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.join_outputs import join_outputs
from tests.huggingface.one_process import assert_gradients, assert_loss
from tests.huggingface.sweep import images
from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_each

Rollouts = list[list[int]]


def test_collators_of_transformers_tell_documents_in_two_ways() -> None:
    offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in (5, 1, 6)])[None]
    ids = text(1, 12, seed=3)["input_ids"]
    lengths = {"max_length_q": 6, "max_length_k": 6}
    flash = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(), **lengths}
    model = dfa_hf.distribute_attention(build("Llama"))
    want = model(input_ids=ids, position_ids=positions).logits
    for given in (flash, {"position_ids": positions, **flash}):
        assert torch.equal(model(input_ids=ids, **given).logits, want)
    plain = {"input_ids": ids, "cu_seq_lens_q": offsets[[0, -1]], "cu_seq_lens_k": offsets[[0, -1]]}
    assert torch.equal(model(**plain).logits, model(input_ids=ids).logits)
    types = model(**text(1, 12, seed=1), token_type_ids=ids % 3)  # which Llama does not embed
    assert torch.equal(types.loss, model(**text(1, 12, seed=1)).loss)


def forest(tokens: int, seed: int) -> Rollouts:
    """Random rollouts that share prefixes, of as many tokens in all, or one or two fewer, when each stands once."""
    rng = random.Random(seed)
    rollouts = [[rng.randrange(61) for _ in range(tokens // 4)]]
    while (left := tokens - sum(pack.tree.length for pack in trees.from_rollouts(rollouts))) > 2:
        begin = rng.choice([*rollouts, []])
        own = begin[: rng.randint(0, len(begin))]
        rollouts.append(own + [rng.randrange(61) for _ in range(min(left - 1, rng.randint(2, 6)))])
    return rollouts


def packed(rollouts: Rollouts, tokens: int) -> dict[str, Any]:
    """A batch of them, padded to as many tokens."""
    (pack,) = trees.from_rollouts(rollouts, multiple_of=tokens)
    return pack.for_transformers()


def one_by_one(reference: Any, rollouts: Rollouts, more: Any = None) -> torch.Tensor:
    """The mean loss of a model that sees one rollout at a time; a shared token counts once.

    `more` returns further arguments for the tokens of a rollout.
    """
    total, count = torch.zeros(()), 0.0
    for own in rollouts:
        ids = torch.tensor(own)
        shares = [sum(other[:end] == own[:end] for other in rollouts) for end in range(2, len(own) + 1)]
        logits = reference(input_ids=ids[None], **(more(ids[None]) if more else {})).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, count = total + (losses / torch.tensor(shares)).sum(), count + sum(1 / share for share in shares)
    return total / count


def rollouts_with_prompts(rank: int, ranks: int) -> None:
    for seed in (ranks, ranks + 1):
        rollouts, want = forest(12 * ranks - 1, seed), build("Qwen3")
        loss = one_by_one(want, rollouts)
        loss.backward()
        model = dfa_hf.distribute_attention(build("Qwen3"))
        got = model(**packed(rollouts, 12 * ranks - 1)).loss
        got.backward()
        assert_loss(got, loss, str(seed))
        assert_gradients(model, gradients(want), str(seed))


def images_in_trees(rank: int, ranks: int) -> None:
    """A tree whose prompt and second answer have an image; each path alone has one or two."""
    segments = [[5 * at + own for own in range(length)] for at, length in enumerate((10, 7, 9))]
    segments[0][3:7] = segments[2][2:6] = [images.TOKEN] * images.TOKENS
    rollouts = [segments[0] + answer for answer in segments[1:]]
    for kind in ("gemma3", "gemma4"):
        form = images.WHOLE[kind][1]

        def pixels(ids: torch.Tensor, form: str = form) -> dict[str, torch.Tensor]:
            marks = (ids == images.TOKEN).int()
            here = int(marks.sum()) // images.TOKENS
            both = images._pixels(form, 2, marks)
            return {name: x if name.endswith("type_ids") else x[:here] for name, x in both.items()}

        want, model = images.build(kind), dfa_hf.distribute_attention(images.build(kind))
        loss = one_by_one(want, rollouts, pixels)
        loss.backward()
        batch = packed(rollouts, 26)
        got = model(**(batch | pixels(batch["input_ids"]))).loss
        got.backward()
        for name, parameter in (*want.named_parameters(), *model.named_parameters()):
            if parameter.grad is None or name.endswith("k_proj.bias"):  # unused in a tower, or 0 but for rounding
                parameter.grad = torch.zeros_like(parameter)
        assert_loss(got, loss, kind, 1e-6)
        assert_gradients(model, gradients(want), kind)


def joined(rank: int, world_size: int) -> None:
    local, rows = 6, 4
    model = dfa_hf.distribute_attention(build("Llama")).eval()
    join_outputs(model)

    def add(module: Any, args: Any, output: Any) -> Any:
        output["router_logits"] = (torch.full((rows * local, local), float(rank)), torch.ones(rows, local))
        output["image_hidden_states"] = torch.full((rows, local, 3), float(rank))
        return output

    handle = model.register_forward_hook(add, prepend=True)
    batch = text(rows, local * world_size, seed=1)
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.router_logits] == [(rows * local, local), (rows, local)]
    assert out.image_hidden_states.shape == (rows, local, 3)
    assert out.logits.shape[:2] == out.hidden_states[0].shape[:2] == (rows, local * world_size)
    want = build("Llama").eval()(**batch, output_hidden_states=True)
    for one, other in zip((out.logits, *out.hidden_states), (want.logits, *want.hidden_states), strict=True):
        assert_close(one, other, tolerance=1e-5, name="logits, hidden states")
    handle.remove()
    with torch.no_grad():
        logits = model(**batch, return_dict=False)[1]
    assert_close(logits, want.logits, tolerance=1e-5, name="logits of a tuple")


def test_rollouts_with_their_prompts_images_in_trees_and_outputs_put_together() -> None:
    run_each(3, rollouts_with_prompts, images_in_trees, joined, timeout=150)


def test_a_whole_model_around_a_distributed_tower_is_refused() -> None:
    """It gives its tower positions along axes, or masks of its own; text alone is exact."""
    whole = images.build("qwen2_vl").model
    batch = images.add_images(images.build("qwen2_vl"), "qwen2_vl", text(1, 40, seed=0))
    del batch["labels"]
    want = whole(**batch).last_hidden_state
    dfa_hf.distribute_attention(whole.language_model, unlisted=True)
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(1, 40\) for inputs_embeds"):
        whole(**batch, position_ids=torch.arange(40)[None])
    with pytest.raises(UnsupportedError, match=r"position_ids of shape \(3, 1, 40\).*a token's place"):
        whole(**batch)
    with dfa_hf.local_attention(whole.language_model):
        assert torch.equal(whole(**batch).last_hidden_state, want)
    ids = text(1, 16, seed=0)["input_ids"]
    text_alone = whole.language_model(input_ids=ids, position_ids=torch.arange(16)[None]).last_hidden_state
    with dfa_hf.local_attention(whole.language_model):
        assert_close(text_alone, whole(input_ids=ids).last_hidden_state, tolerance=1e-5, name="text")
    gemma = images.build("gemma3").model
    dfa_hf.distribute_attention(gemma.language_model)
    with pytest.raises(UnsupportedError, match="a mask beyond causal"):
        gemma(input_ids=ids)


def test_a_model_of_several_parts_has_its_own_attention_locally_and_in_its_tower() -> None:
    model = dfa_hf.distribute_attention(images.build("qwen3_vl"))
    batch = images.add_images(model, "qwen3_vl", text(2, 40, seed=0))
    with dfa_hf.local_attention(model):
        want = model(**batch, use_cache=False).logits
    assert_close(model(**batch).logits, want, tolerance=1e-5, name="logits")
    assert model.config.vision_config._attn_implementation == "eager"
