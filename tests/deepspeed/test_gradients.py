"""One rule for the loss, and the gradients of one process at every ZeRO stage, for every mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from tests.deepspeed import harness
from tests.support.close import assert_close
from tests.support.models import build
from tests.support.workers import run_ranks


def check(rank: int, world_size: int, sizes: list[int], stages: list[int], kind: str = "Llama", **changes: Any) -> None:
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    for size in sizes:
        length = 12 * size
        batches = harness.samples(world_size // size, length, unlabelled=13 if size > 1 else 2)
        want_loss, want = harness.reference(kind, batches, **changes)
        for stage in stages:
            model = build(kind, **changes)
            config = harness.settings(stage, size, checkpoint="remat" if stage % 2 else "none")
            if (world_size, size) == (4, 2):
                config["zero_optimization"] |= harness.BUCKETS
                config |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
                config |= {"prescale_gradients": True, "gradient_predivide_factor": 2.0} if stage == 0 else {}
            engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            mesh = dfa_ds.mesh_of(engine)
            assert (mesh.size, mesh.data_size) == (size, world_size // size)
            assert engine.train_batch_size() == mesh.data_size
            batch = dfa_ds.shard_batch(batches[mesh.data_rank], group=mesh.group)
            for own_loss in (True, False):  # the second step finds ZeRO-3's gathers in their steady state
                if own_loss:
                    loss = engine(**batch).loss
                else:
                    logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
                    loss = dfa_ds.loss(logits, batch["shift_labels"], group=mesh.group)
                engine.backward(loss)
                assert abs(harness.mean_over_ranks(loss) - want_loss) < 1e-5 * want_loss
                for name, parameter in engine.module.named_parameters():
                    gradient = safe_get_full_grad(parameter)
                    where = f"size {size}, ZeRO {stage}, own loss {own_loss}, {name}"
                    assert_close(gradient.view_as(want[name]), want[name], tolerance=1e-5, name=where)
                engine.step()
            engine.destroy()


@pytest.mark.support(
    "deepspeed", "ZeRO 0 to 3, gradients of one process; sequences over 1 to 4 ranks, the rest data parallel"
)
@pytest.mark.parametrize(("ranks", "sizes"), [(2, [1]), (3, [3]), (4, [2, 4])])
def test_gradients_are_those_of_one_process_at_every_zero_stage(ranks: int, sizes: list[int]) -> None:
    run_ranks(ranks, check, sizes, [0, 1, 2, 3], timeout=170)


@pytest.mark.support("deepspeed", "attention sinks, ZeRO 0 and 3")
def test_learned_sinks_have_their_gradients_where_parameters_are_gathered_layer_by_layer() -> None:
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7}
    run_ranks(2, partial(check, kind="GptOss", **changes), [2], [0, 3], timeout=170)
