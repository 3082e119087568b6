"""One rule for the loss, and the gradients of one process at every ZeRO stage, for every mesh, packs and hybrids."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.huggingface.sweep import tiny
from tests.huggingface.test_packed import one_by_one, pack
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients
from tests.support.workers import run_ranks

HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


@dataclass(frozen=True)
class Job:
    """A model over so many ranks for each sequence, at some stages of ZeRO; a lower-case kind is one of the sweep."""

    kind: str
    size: int
    stages: tuple[int, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    @property
    def is_hybrid(self) -> bool:
        return self.kind.islower()

    def model(self) -> Any:
        return tiny.build(self.kind).float() if self.is_hybrid else build(self.kind, **self.changes)

    def wanted(self, batches: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one process; of a pack, one document after another."""
        if not self.packed:
            return harness.reference(self.kind, batches, **self.changes)
        model = self.model()
        _, loss = one_by_one(model, batches[0])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return loss.item(), gradients(model)

    def settings(self, stage: int, world_size: int) -> dict[str, Any]:
        checkpoint = "remat" if self.is_hybrid or stage % 2 else "none"
        config = harness.settings(stage, self.size, checkpoint=checkpoint)
        if (world_size, self.size) == (4, 2):
            config["zero_optimization"] |= harness.BUCKETS
            config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
            config |= {"prescale_gradients": True, "gradient_predivide_factor": 2.0} if stage == 0 else {}
        return config


def check(rank: int, world_size: int, jobs: list[Job]) -> None:
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    gc.freeze()  # DeepSpeed collects garbage as each engine starts
    for job in jobs:
        length = 12 * job.size
        batches = harness.samples(world_size // job.size, length, unlabelled=13 if job.size > 1 else 2)
        batches = [pack(length, seed=4)] if job.packed else batches
        want_loss, want = job.wanted(batches)
        # States are in float32, with sums of many exponentials.
        largest = max(gradient.abs().max() for gradient in want.values()) if job.is_hybrid else 1.0
        for stage in job.stages:
            model = job.model()
            config = job.settings(stage, world_size)
            engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            mesh = dfa_ds.mesh_of(engine)
            assert (mesh.size, mesh.data_size) == (job.size, world_size // job.size)
            assert engine.train_batch_size() == mesh.data_size
            batch = batches[mesh.data_rank]
            # The second step finds ZeRO-3's gathers in their steady state.
            for own_loss in (True,) if job.is_hybrid else (True, job.packed):
                COUNTERS.reset()
                if own_loss:
                    loss = engine(**batch).loss
                else:
                    logits = engine(**{name: x for name, x in batch.items() if name != "labels"}).logits
                    loss = dfa_ds.loss(logits, batch["labels"], group=mesh.group)
                engine.backward(loss)
                counts = COUNTERS.snapshot()
                assert job.is_hybrid or counts["attention_forwards"] == LAYERS
                assert job.is_hybrid or counts["replays"] == LAYERS * (stage % 2)
                where = f"{job}, {world_size} ranks, ZeRO {stage}, own loss {own_loss}"
                assert abs(harness.mean_over_ranks(loss) - want_loss) < 1e-5 * want_loss or job.is_hybrid, where
                for name, parameter in engine.module.named_parameters():
                    gradient = safe_get_full_grad(parameter)
                    got = torch.zeros_like(want[name]) if gradient is None else gradient.view_as(want[name])
                    tolerance = 1e-3 if job.is_hybrid else 1e-5
                    assert_close(got / largest, want[name] / largest, tolerance=tolerance, name=f"{where}, {name}")
                engine.step()
            engine.destroy()


SINKS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.support(
    "deepspeed", "ZeRO 0 to 3, gradients of one process; sequences over 1 to 4 ranks, the rest data parallel"
)
@pytest.mark.support("deepspeed", "attention sinks, ZeRO 0 and 3")
@pytest.mark.support("deepspeed", "packed documents")
@pytest.mark.parametrize(
    ("ranks", "jobs"),
    [
        (2, [Job("Llama", 1, (1, 3)), Job("GptOss", 2, (0, 3), SINKS), Job("Gemma3Text", 2, (3,), MIXED, packed=True)]),
        (3, [Job("Llama", 3, (0, 1, 2, 3)), Job("Llama", 3, (0, 1, 2, 3), packed=True)]),
        (4, [Job("Llama", 2, (0, 1, 2, 3)), Job("Llama", 4, (2, 3))]),
    ],
    ids=["2", "3", "4"],
)
def test_gradients_are_those_of_one_process_at_every_zero_stage(ranks: int, jobs: list[Job]) -> None:
    run_ranks(ranks, check, jobs, timeout=170)


@pytest.mark.support("deepspeed", "hybrids, rematerialized, at ZeRO 0 and 3")
def test_gradients_of_hybrids_are_those_of_one_process() -> None:
    several = ("nemotron_h", "qwen3_next")
    stages = {kind: (0, 3) if kind in several else (3 * (at % 2),) for at, kind in enumerate(HYBRIDS)}
    run_ranks(2, check, [Job(kind, 2, stages[kind], packed=True) for kind in HYBRIDS], timeout=170)
