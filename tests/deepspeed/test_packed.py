"""Packed documents through DeepSpeed's block, and through HF Trainer and accelerate, train as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.deepspeed.test_trainer import KEYS, history, json, parallelism, trainer
from tests.huggingface.test_packed import one_by_one, pack
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients
from tests.support.workers import run_ranks


def through_the_block(rank: int, world_size: int, kind: str, changes: dict[str, Any], stages: list[int]) -> None:
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    whole = pack(12 * world_size, seed=world_size)
    reference = build(kind, **changes)
    _, want_loss = one_by_one(reference, whole)
    want_loss.backward()
    want = gradients(reference)
    for stage in stages:
        model = build(kind, **changes)
        engine, *_ = dfa_ds.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=harness.settings(stage, world_size, checkpoint="remat" if stage % 2 else "none"),
        )
        batch = dfa_ds.shard_batch(whole, group=dfa_ds.mesh_of(engine).group)
        for _ in range(2):  # the second step finds ZeRO-3's gathers in their steady state
            COUNTERS.reset()
            loss = engine(**batch).loss
            engine.backward(loss)
            counts = COUNTERS.snapshot()
            assert (counts["attention_forwards"], counts["replays"]) == (LAYERS, LAYERS * (stage % 2))
            assert abs(harness.mean_over_ranks(loss) - want_loss.item()) < 1e-5 * want_loss.item()
            for name, parameter in engine.module.named_parameters():
                gradient = safe_get_full_grad(parameter)
                where = f"{kind}, {world_size} ranks, ZeRO {stage}, {name}"
                assert_close(gradient.view_as(want[name]), want[name], tolerance=1e-5, name=where)
            engine.step()
        engine.destroy()


@pytest.mark.support("deepspeed", "packed documents")
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_a_pack_are_those_of_its_documents_on_one_process(ranks: int) -> None:
    run_ranks(ranks, through_the_block, "Llama", {}, [0, 1, 2, 3], timeout=170)


def test_packs_in_windows_beside_full_layers() -> None:
    changes = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    run_ranks(2, through_the_block, "Gemma3Text", changes, [3], timeout=170)


class Packs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of several documents, as a collator would pack them; every other one begins like a plain sequence.

    Each has six labels, as Trainer's loss with DeepSpeed weighs micro-batches alike: the first, the last, or any.
    """

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = {name: rows[0] for name, rows in pack(24, seed=index).items()}
        if index % 2:
            sample["position_ids"] = torch.cat((torch.arange(12), torch.arange(12)))
        inside = sample["position_ids"].nonzero().flatten()
        mixed = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(index))]
        kept = (inside[:6], inside[-6:], mixed[:6])[index % 3]
        sample["labels"] = torch.full_like(sample["input_ids"], -100).index_copy(0, kept, sample["input_ids"][kept])
        return sample


def packed_trainer(folder: str, **arguments: Any) -> Any:
    made = trainer(folder, **arguments)
    made.model.config.use_cache = False  # with a cache transformers does not look for documents
    made.train_dataset = made.eval_dataset = Packs()
    return made


def alone(rank: int, world_size: int, folder: str) -> list[list[float]]:
    run = packed_trainer(folder)
    run.train()
    return history(run)


def together(rank: int, world_size: int, folder: str) -> list[list[float]]:
    harness.prepare_worker(rank)
    dfa_ds.install()
    run = packed_trainer(folder, deepspeed=json(3, checkpoint="remat"), **parallelism(world_size))
    run.train()
    return history(run)


def test_trainer_keeps_documents_apart_that_accelerate_has_cut(tmp_path: Any) -> None:
    wanted = run_ranks(1, alone, str(tmp_path), timeout=120)[0]
    for found in run_ranks(2, together, str(tmp_path), timeout=170):
        for mine, want, name in zip(found, wanted, KEYS, strict=True):
            assert mine == pytest.approx(want, rel=1e-4), name
