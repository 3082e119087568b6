"""Packed documents, told by position_ids, are computed as eager attention computes them on one rank, one at a time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import document_starts as packed
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.compared import check
from tests.huggingface.test_parity import MODELS, NEWER
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import run_ranks


def pack(length: int, seed: int, rows: int = 1) -> dict[str, torch.Tensor]:
    """Rows of documents of any length, one of a single token among them; no label for a document's first token."""
    batch = text(rows, length, seed)
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(rows):
        inner = sorted((torch.randperm(length - 3, generator=generator)[:3] + 1).tolist())
        documents.append((0, *inner, inner[-1] + 1, length))
    batch["position_ids"] = packed.positions_of(tuple(documents))
    batch["labels"][batch["position_ids"] == 0] = -100
    return batch


def one_by_one(reference: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and mean loss of a model that sees one document at a time."""
    rows = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        ends = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        rows.append(torch.cat([reference(input_ids=ids[None, lo:hi]).logits for lo, hi in pairwise(ends)], 1))
    logits = torch.cat(rows)
    labels = batch["labels"][:, 1:].flatten()
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, ignore_index=-100)


def compare(rank: int, world_size: int, names: list[str], rows: int) -> None:
    for seed, name in enumerate(names):
        kind, changes = (MODELS | NEWER)[name]
        batch = pack(12 * world_size - 1, 31 * seed + world_size, rows)
        reference = build(kind, seed, **changes)
        want = one_by_one(reference, batch)
        want[1].backward()
        model = dfa_hf.distribute_attention(build(kind, seed, **changes))
        check(model, batch, reference, want, name)
        documents = packed.of_positions(batch["position_ids"])
        assert documents is not None
        length = 12 * world_size - 1
        offsets = [0, *(row * length + end for row, ends in enumerate(documents) for end in ends[1:])]
        told = {key: value for key, value in batch.items() if key != "position_ids"}
        told |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(offsets, dtype=torch.int32))
        check(model, told, reference, want, f"{name}, told by offsets")


@pytest.mark.support("models", "the same, packed documents")
@pytest.mark.parametrize(("ranks", "rows"), [(1, 2), (2, 1), (3, 2)])
def test_logits_loss_and_gradients_are_those_of_eager_attention_on_one_rank(ranks: int, rows: int) -> None:
    names = list(MODELS) if ranks == 2 else ["llama-yarn", "gemma3-window-in-one-layer", *NEWER]
    run_ranks(ranks, compare, names, rows, timeout=170)


def checkpointed(rank: int, world_size: int) -> None:
    batch = pack(24, seed=11)
    other = text(1, 24, seed=12)
    seen = {}
    undone = dfa_hf.distribute_attention(build("Qwen2"), config=TrainingConfig(checkpoint="remat"))
    for checkpoint in ("none", "full", "remat", "auto", "auto, re-entrant"):
        model = build("Qwen2") if checkpoint != "none" else undone
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=checkpoint.partition(",")[0]))
        if "auto" in checkpoint:  # asked for as transformers does, before or after
            model.gradient_checkpointing_enable({"use_reentrant": checkpoint != "auto"})
        COUNTERS.reset()
        plain = model(**other).loss
        loss = model(**batch).loss  # before the other's backward, whose recompute is of no pack
        loss.backward()
        plain.backward()
        seen[checkpoint] = (gradients(model), COUNTERS.snapshot())
    want, plainly = seen["none"]
    assert plainly["replays"] == 0
    assert plainly["attention_forwards"] == 2 * LAYERS
    assert seen["full"][1]["attention_forwards"] == 4 * LAYERS
    for once in ("remat", "auto", "auto, re-entrant"):
        assert seen[once][1]["attention_forwards"] == 2 * LAYERS
        assert seen[once][1]["replays"] == 2 * LAYERS
    for name, gradient in want.items():
        for others in seen:
            assert torch.equal(seen[others][0][name], gradient)


def ends_between_ranks(rank: int, world_size: int) -> None:
    """No rank sees a document begin amid its tokens, and the first one's positions are those of one sequence."""
    batch = text(1, 24, seed=1)
    batch["position_ids"] = packed.positions_of(((0, 12, 24),))
    want = build("Llama")(**batch, use_cache=False)
    model = dfa_hf.distribute_attention(build("Llama"))
    got = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    assert_close(got.logits, shard_sequence(want.logits), tolerance=1e-5, name="logits")


def each(rank: int, world_size: int) -> None:
    checkpointed(rank, world_size)
    ends_between_ranks(rank, world_size)


def test_rematerialized_packs_run_attention_once_and_documents_that_end_where_a_rank_does_are_seen() -> None:
    run_ranks(2, each)


def test_collators_of_transformers_tell_documents_in_two_ways() -> None:
    offsets = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    positions = packed.positions_of(((0, 5, 6, 12),))
    ids = text(1, 12, seed=3)["input_ids"]
    lengths = {"max_length_q": 6, "max_length_k": 6}
    flash = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(), **lengths}
    model = dfa_hf.distribute_attention(build("Llama"))
    want = model(input_ids=ids, position_ids=positions).logits
    for given in (flash, {"position_ids": positions, **flash}):
        assert torch.equal(model(input_ids=ids, **given).logits, want)
    plain = {"input_ids": ids, "cu_seq_lens_q": offsets[[0, -1]], "cu_seq_lens_k": offsets[[0, -1]]}
    assert torch.equal(model(**plain).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 9]])}, "not those of documents"),
        ({"position_ids": torch.tensor([[3, 4, 0, 1, 2, 3, 4, 5]])}, "not those of documents"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 9])}, "cu_seq_lens_q from 0 to 9"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 4, 8])}, "cu_seq_lens_q from 0 to 8"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 8]), "cu_seq_lens_k": torch.tensor([0, 5, 8])},
            "cu_seq_lens_k other than cu_seq_lens_q",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8]), "position_ids": torch.arange(8)[None]}, "disagree"),
    ],
)
def test_a_batch_whose_documents_are_not_clear_is_refused(given: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.distribute_attention(build("Llama"))(input_ids=torch.ones(1, 8, dtype=torch.long), **given)
