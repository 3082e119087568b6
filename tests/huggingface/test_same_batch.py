"""Ranks of a group that load other samples are refused, whatever differs; the same ones are not."""

from __future__ import annotations

import itertools
import logging
import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.huggingface import batch, mesh
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.comm.weights import digests
from tests.huggingface.test_trainer import prepare_worker
from tests.support.arguments import told
from tests.support.models import VOCABULARY, build, text
from tests.support.workers import over_ranks, run_each, run_ranks

LENGTH, TIMEOUT = 12, 5.0


def packs(batch: dict[str, torch.Tensor], at: int = 5) -> dict[str, torch.Tensor]:
    positions = torch.cat((torch.arange(at), torch.arange(LENGTH - at)))[None]
    return {**batch, "position_ids": positions.expand(len(batch["input_ids"]), -1)}


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Two tokens at each other's places."""
    x = x.clone()
    x[0, 2], x[0, 7] = (x[0, 7] + 0, x[0, 2] + 0) if x[0, 2] != x[0, 7] else ((x[0, 7] + 1) % VOCABULARY, x[0, 2] + 0)
    return x


def other_batches(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    same, last = text(2, LENGTH, seed=0), rank == world_size - 1
    ids, labels = same["input_ids"], same["labels"]
    tree = {"prompt_tree": ((4, 4, 4), (-1, 0, 0))}
    draws: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "samples": (same, text(2, LENGTH, seed=1)),
        "without labels": ({"input_ids": ids}, {"input_ids": swapped(ids)}),
        "tokens at other places": (same, {"input_ids": swapped(ids), "labels": labels}),
        "rows in another order": (same, {"input_ids": ids.flip(0), "labels": labels.flip(0)}),
        "labels": (same, {"input_ids": ids, "labels": labels.masked_fill(labels == labels[labels != -100][0], -100)}),
        "number of labels": tuple({**same, "num_items_in_batch": torch.tensor(n)} for n in (20.0, 10.0)),
        "labels there": (same, {"input_ids": ids}),
        "documents": (packs(same), packs({"input_ids": swapped(ids), "labels": labels})),
        "where documents end": (packs(same), packs(same, at=7)),
        "documents at all": (packs(same), same),
        "without documents": (same, packs(same)),
        "a tree's tokens": ({**same, **tree}, {"input_ids": swapped(ids), "labels": labels, **tree}),
        "a tree": ({**same, **tree}, {**same, "prompt_tree": ((4, 4, 4), (-1, 0, 1))}),
    }
    for theirs, mine in draws.values():
        model(**theirs)
        part = mine if last else theirs
        with pytest.raises(UnsupportedError, match=r"batches that differ between the ranks.*DistributedSampler"):
            model(**part)
    whole = text(2, LENGTH, seed=rank)
    unchecked = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(verify="off"))
    unchecked(**whole)
    with dfa_hf.local_attention(model):
        model(**whole)
    model.eval()
    model(**same)
    model.model(input_ids=ids)
    with pytest.raises(UnsupportedError, match="batches that differ"):
        model.model(input_ids=whole["input_ids"])


def test_all_numbers_of_a_call_are_compared_by_whatever_name_images_by_their_shape() -> None:
    ids, images, weights = torch.ones(1, 4, dtype=torch.long), torch.rand(1, 3, 4, 4), torch.rand(1, 4)
    tree = Tree((4,), (-1,))
    call = {"image_pixel_values": images, "audio_input_features": torch.rand(1, 5, 2), "crops": images, "tree": tree}
    call |= {"audio_embed_sizes": torch.tensor([5]), "weights": weights, "sizes": [[4, 4], torch.tensor([2])]}
    call |= {"input_ids": ids, "return_dict": True, "loss_kwargs": {}, "names": ["a"], "logits_to_keep": 0}
    told = batch.told(call)
    assert next(iter(told)) == "input_ids"
    shapes = {"image_pixel_values": [1, 3, 4, 4], "crops": [1, 3, 4, 4], "audio_input_features": [1, 5, 2]}
    others = ("input_ids", "weights", "sizes", "audio_embed_sizes", "logits_to_keep", "tree")
    assert told == shapes | {name: call[name] for name in others}


def absent_ranks(rank: int, world_size: int) -> tuple[str, float, str]:
    """The second rank evaluates alone, after a step of all."""
    group = dist.new_group([*range(world_size)], timeout=timedelta(seconds=TIMEOUT))
    model = dfa_hf.distribute_attention(build("Llama"), group=group)
    part, said = text(2, LENGTH, seed=0), StringIO()
    model(**part).loss.backward()
    logging.getLogger("dfa_megatron").addHandler(logging.StreamHandler(said))
    began = time.monotonic()
    if rank != 1:
        time.sleep(2 * TIMEOUT)
        return "", 0.0, ""
    return told(lambda: model(**part)), time.monotonic() - began, said.getvalue()


def test_a_rank_that_evaluates_alone_is_told_who_does_not_come() -> None:
    error, seconds, said = run_ranks(3, absent_ranks, timeout=120)[1]
    assert error.startswith("AbsentError: "), error
    assert all(f"rank {absent}" in error or "ranks 0, 2" in error for absent in (0, 2)), error
    assert "compares its batch with those of the other ranks" in error, error
    assert seconds < 2 * TIMEOUT
    assert "of the group lives, after " in said, "the warning after a quarter"


def one_rank_alone(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    """Rank 0 alone makes groups, or evaluates a Trainer."""
    from transformers import Trainer, TrainingArguments

    prepare_worker(rank, world_size)
    settings = TrainingArguments(folder, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1)
    data = [{name: x[0] for name, x in text(1, LENGTH, seed=seed).items()} for seed in range(2)]
    trainer = Trainer(build("Llama"), settings, train_dataset=data, eval_dataset=data)
    alone = folder.endswith("groups")
    mesh.timeout_of = lambda group: timedelta(seconds=TIMEOUT)  # type: ignore[assignment]
    if not alone:
        dfa_hf.distribute_trainer(trainer)
        trainer.train()
    began = time.monotonic()
    if rank:
        time.sleep(2 * TIMEOUT)
        return "", 0.0
    said = told(lambda: dfa_hf.distribute_trainer(trainer) if alone else trainer.evaluate())
    return said, time.monotonic() - began


@pytest.mark.parametrize("what", ["groups", "evaluation"])
def test_a_trainer_of_one_rank_alone_is_told_who_does_not_come(what: str, tmp_path: Path) -> None:
    error, seconds = run_ranks(2, one_rank_alone, str(tmp_path / what), timeout=90)[0]
    assert error.startswith("AbsentError: "), error
    assert "rank 1 of the group" in error
    assert seconds < 2 * TIMEOUT


@over_ranks(3)
def test_ranks_that_step_with_gradients_of_their_own_are_refused_after_the_first_step(rank: int, ranks: int) -> None:
    """And those that step with averaged ones are not."""
    from accelerate import Accelerator

    for averaged in (True, False):
        model = dfa_hf.distribute_attention(build("Llama"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            part = text(2, LENGTH, seed=step)
            if step and not averaged:
                with pytest.raises(DisagreementError, match=r"What works: gradients that are averaged over the ranks"):
                    model(**part)
                model.eval()
                with torch.no_grad():
                    model(**part)
                break
            model(**part).loss.backward()
            model(**part).loss.backward()  # before the step nothing has changed
            for parameter in model.parameters() if averaged else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="an accelerator of one process among 3 ranks"):
        dfa_hf.distribute_accelerator(Accelerator(cpu=True), build("Llama"))


def other_weights(rank: int, world_size: int) -> None:
    """Draw a parameter that the ranks of a group hold differently; another group may, and shards must."""
    from torch.distributed.fsdp import fully_shard

    draw, half = random.Random(3), world_size // 2
    mine = [dist.new_group([*range(lo, lo + half)]) for lo in (0, half)][rank // half]
    part = text(2, LENGTH, seed=0)
    groups = dfa_hf.distribute_attention(build("Llama"), group=mine)
    groups(**text(2, LENGTH, seed=rank // half))  # a sampler over the groups
    with pytest.raises(UnsupportedError, match="batches that differ between the ranks"):
        groups(**text(2, LENGTH, seed=rank))  # and one over all ranks, which is the classic mistake

    def model(seed: int = 0, kind: str = "Llama", verify: str = "on") -> Any:
        made = build(kind, seed=seed, head_dim=8).bfloat16() if draw.random() < 0.5 else build(kind, seed=seed)
        return dfa_hf.distribute_attention(made, group=mine, config=TrainingConfig(verify=verify))

    for kind in ("Qwen3", "Mixtral"):
        one = model(rank // half, kind)  # each group its own weights
        named = dict(one.named_parameters())
        for name in draw.sample(sorted(named), 3):
            place = tuple(draw.choice((0, size // 2, size - 1)) for size in named[name].shape[:-1])
            change, which = draw.choice((0.25, float("nan"))), draw.randrange(half)
            before = named[name].detach().clone()
            named[name].data[place] += change if rank % half == which else 0
            said = rf"other weights: {re.escape(name)} is the first that differs"
            with pytest.raises(DisagreementError, match=said):
                one(**part)
            named[name].data.copy_(before)
        one(**part).loss.backward()
        named[name].data[place] += rank
        one(**part)  # compared once
        assert all(parameter.untyped_storage().resizable() for parameter in one.parameters())
        dfa_hf.distribute_attention(one, group=mine)(**part)
    with pytest.raises(DisagreementError, match=r"What works: one seed .*broadcast"):
        model(rank)(**part)
    model(rank, verify="off")(**part)
    for mark in ("allreduce", "ds_id", "_fsdp_flattened", "_is_flat_param"):  # experts, ZeRO 3, FSDP1
        marked = model(rank)
        for parameter in marked.parameters():
            setattr(parameter, mark, mark != "allreduce")
        assert digests(marked) == {}, mark
    assert digests(model(rank).to("meta")) == digests(model(rank).to(torch.float8_e4m3fn)) == {}
    sharded = model(rank)
    fully_shard(sharded)
    assert digests(sharded) == {}
    whole = build("Llama", seed=rank)
    fully_shard(whole)
    dfa_hf.distribute_attention(whole)(**text(2, LENGTH, seed=0)).loss.backward()


def weights_of_one_rank(rank: int, world_size: int) -> None:
    """Draw ranks that change weights between two calls, before all get them: all compare weights then, or none."""
    draw, model, part = random.Random(5), dfa_hf.distribute_attention(build("Llama")), text(2, LENGTH, seed=0)
    first = draw.randrange(world_size)
    with torch.no_grad():
        model(**part)
        for parameter in model.parameters():
            parameter.mul_(0.5) if rank == first else None
            dist.broadcast(parameter.data, first)
    for _ in range(2):
        model(**part).loss.backward()
    one, alone = draw.randrange(world_size), [dist.new_group([each]) for each in range(world_size)][rank]
    model.load_state_dict(build("Llama", seed=rank == one).state_dict())  # later: both comparisons are made
    for group in (None, alone, None):  # what the ranks of a group have compared says nothing of another
        with nullcontext() if group else pytest.raises(DisagreementError, match="hold other weights"):
            dfa_hf.distribute_attention(model, group=group)(**part)


NEW: dict[str, Callable[[Any], Any]] = {
    "embed_tokens": lambda model: model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=False),
    "mlp": lambda model: setattr(model.model.layers[1], "mlp", type(model.model.layers[1].mlp)(model.config)),
    "lm_head": lambda model: model.set_output_embeddings(torch.nn.Linear(32, VOCABULARY, bias=False)),
}


@over_ranks(2)
def test_parameters_that_come_later_are_compared_as_the_first_ones_are(rank: int, ranks: int) -> None:
    for name, own in itertools.product(NEW, (False, True)):
        model, part = dfa_hf.distribute_attention(build("Llama")), text(2, LENGTH, seed=0)
        for _ in range(3):  # the third compares nothing
            model(**part)
            torch.autograd.graph.increment_version(model.model.norm.weight)
        torch.manual_seed(rank if own else 0)
        NEW[name](model)
        said = rf"other weights: \S*{name}\S* is the first that differs"
        with pytest.raises(DisagreementError, match=said) if own else nullcontext():
            model(**part)


def test_ranks_of_a_group_with_other_weights_hear_which_and_those_with_other_batches_are_refused() -> None:
    run_each(4, other_batches, other_weights, weights_of_one_rank, timeout=150)
