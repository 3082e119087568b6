"""Trees and masks in evaluation and in loops that cut rows themselves, and ranks and stages that refuse them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, DistAttentionError
from dfa_megatron.megatron import declare_batch_layout, shard_batch
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.megatron import attends
from tests.megatron.test_all_parallelisms import TREES
from tests.support.arguments import assert_refused
from tests.support.workers import run_each, run_ranks

SEQUENCE = 48
TREE, OTHER = (attends.forest(random.Random(seed), SEQUENCE) for seed in (7, 8))


def evaluation(rank: int, ranks: int) -> None:
    """The logits of an evaluation, without labels, give the losses of training."""
    for name in ("tree learned", "mask stack", "tree stack"):
        row = like(name, {"cp": ranks}, "boundary")
        with harness.with_layers(row), torch.compiler.set_stance("force_eager"):
            harness.start(row)
            model, batch = harness.model_of(row), next(harness.batches(row))
            losses = model(**harness.taken(batch, model))
            with torch.no_grad():
                logits = model.eval()(**harness.taken(batch, model, labels=None))
            scores = logits.float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
            torch.testing.assert_close(-scores, losses, rtol=1e-5, atol=1e-5, check_dtype=False)
    seen = harness.batch_of(like("mask stack", {"cp": ranks}, "boundary"), model.cp_group)
    assert_refused(r"a mask in a Mamba or gated delta net layer", model, **harness.taken(seen, model))


def own_loop(rank: int, ranks: int) -> None:
    """A loop that cuts its rows itself; then ranks whose masks do not fit, or that bring different trees."""
    first = like("mask", {"cp": ranks})
    whole, alone = first.global_batch(0)[0], first.alone()
    harness.start(alone)
    wanted = harness.alone(alone, harness.batch_of(alone, None), harness.model_of(alone))

    def losses(**entries: Any) -> Any:
        group, options = parallel_state.get_context_parallel_group(), MegatronConfig(data_layout=layout)
        return model(tokens, None, None, labels=labels, **shard_batch(entries, group, options))

    harness.start(first)
    for layout, order in (("boundary", "zigzag"), ("contiguous", "contiguous")):
        here = attends.positions(order, SEQUENCE, ranks, rank)
        model = harness.model_of(like("mask", {"cp": ranks}, layout))
        tokens, labels = whole["tokens"][:, here], whole["labels"][:, here]
        if layout == "contiguous":  # the other one is Megatron's own, which nobody declares
            declare_batch_layout(parallel_state.get_context_parallel_group(), "contiguous")
        mine = losses(mask=whole["mask"], mask_positions=whole["position_ids"][0])
        torch.testing.assert_close(mine, wanted[:, here], rtol=1e-5, atol=1e-5, check_dtype=False)
    with pytest.raises(DistAttentionError, match=f"a prompt_tree or mask of 24 tokens with rows of {SEQUENCE}"):
        losses(mask=masks.full(24 if rank == 1 else SEQUENCE))  # those who would wait are told
    with pytest.raises(DisagreementError, match=r"(?s)prompt tree.*prompt tree"):
        losses(prompt_tree=OTHER if rank else TREE)


def uncut_images(rank: int, ranks: int) -> None:
    """The places of images stay whole."""
    for name in ("images", "rows of images", "mask of images"):
        row = like(name, {"cp": ranks}, "boundary")
        harness.start(row)
        batch, model = next(harness.batches(row)), harness.model_of(row)
        assert batch["position_ids"].shape[-1] == batch["input_ids"].shape[1] * ranks
        plain = {**batch, "position_ids": torch.zeros_like(batch["position_ids"])}
        losses = (model(**harness.taken(given)) for given in (batch, plain))
        assert (next(losses) - next(losses)).abs().max() > 1e-3, "the places tell"
        batch["position_ids"] = cut = batch["position_ids"].chunk(ranks, -1)[rank]
        short = rf"a rotary table of shape \({cut.shape[-1]}, .* for {cut.shape[-1] * ranks} positions"
        assert_refused(short, model, **harness.taken(batch))


@pytest.mark.support("megatron", TREES)
def test_evaluation_and_other_loops_equal_one_rank_and_different_trees_and_cut_places_are_told_of() -> None:
    run_each(3, evaluation, own_loop, uncut_images, timeout=120)


def refuses(rank: int, world_size: int, windowed: list[int], chunks: int | None) -> None:
    row = like("mask", {"pp": 2, "vp": chunks}, config={"window_size": (7, 0), "window_attn_skip_freq": windowed})
    harness.step(row)


@pytest.mark.parametrize(("windowed", "chunks"), [([1, 0, 0, 0], None), ([0, 0, 0, 1], 2)])
def test_a_stage_that_refuses_says_why(windowed: list[int], chunks: int | None) -> None:
    with pytest.raises(AssertionError, match="a mask in a layer with window"):
        run_ranks(2, refuses, windowed, chunks, timeout=20, grace=0.1)
