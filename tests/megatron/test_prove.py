"""`prove` compares a Megatron job in every topology and layout, finds what is planted, and changes nothing."""

from __future__ import annotations

import functools
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from dfa_megatron import attention
from dfa_megatron.errors import ProofError
from dfa_megatron.megatron import prove, proved_job
from dfa_megatron.megatron.layers import rotary
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import ALLGATHER, FULL, PER_TOKEN, TRAINS, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.megatron import sharded
from tests.support.arguments import assert_refused
from tests.support.plants import attention_with, documents_lost, states_dropped
from tests.support.workers import by_turns, run_each, run_ranks

WINDOW = {"window_size": (9, 0)}
EXPERTS = {
    **ALLGATHER, "moe_z_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5,
}  # fmt: skip
BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
CP2 = {"cp": 2}


def job(
    sizes: dict[str, int], layout: str, config: dict[str, Any], optimizer: str = "", name: str = ""
) -> MegatronDraw:
    """A job that rematerializes."""
    more = {"optimizer": optimizer, "dtype": "float32 of few layers"}
    return like(name or "plain", sizes, layout, "auto", config=FULL | config, **more)


CASES = [
    job(CP2, "boundary", WINDOW), job(CP2, "contiguous", BF16),
    job(CP2, "contiguous", {"num_layers": 4}, name="latent"), job(CP2, "zigzag", WINDOW | PER_TOKEN, "distributed"),
    job(CP2, "boundary", EXPERTS | BF16), job({"pp": 2}, "boundary", WINDOW),
    job(CP2, "boundary", WINDOW | {"mtp_num_layers": 2}),
    job(CP2, "zigzag", WINDOW | PER_TOKEN | {"mtp_num_layers": 1}, "distributed"),
]  # fmt: skip
FOUR = [
    job({"tp": 2, "cp": 2}, "boundary", WINDOW, "distributed"),
    job({"pp": 2, "cp": 2, "vp": 2}, "boundary", {}),
    job({"cp": 2, "dp": 2, "ep": 2}, "boundary", EXPERTS),
]


def each_case(rank: int, world_size: int, cases: list[MegatronDraw]) -> list[str]:
    said = []
    for row in by_turns(cases):
        harness.start(row)
        said.append(str(prove(harness.wrapped(row))))
    return said


@pytest.mark.parametrize("cases", [CASES, FOUR], ids=["2", "4"])
def test_nothing_is_found_where_nothing_is_wrong(cases: list[MegatronDraw]) -> None:
    for said in zip(*run_ranks(cases[0].ranks, each_case, cases, timeout=120), strict=True):
        for table in said:
            assert table == said[0]
            assert "compute what one rank computes" in table
            assert sum("gradient of parameters" in line for line in table.splitlines()) == 2, table


def local_rope(models: Any) -> Any:
    """Every rank takes the first rows of the table."""

    def wrong(table: torch.Tensor, visit: Any, **_: Any) -> torch.Tensor:
        return table[torch.arange(visit.rows[1]) % len(table)]

    return patch.object(rotary, "rows_of", wrong)


def labels_of_chunks(models: Any) -> Any:
    """Labels are shifted inside each of a rank's two chunks."""
    real = proved_job.batches.shard_batch

    def wrong(*args: Any) -> Any:
        cut = real(*args)
        return {**cut, "labels": cut["input_ids"].unflatten(1, (2, -1)).roll(-1, 2).flatten(1)}

    return patch.object(proved_job.batches, "shard_batch", wrong)


@contextmanager
def unreduced(models: Any) -> Any:
    config = models[0].config
    with patch.object(config, "finalize_model_grads_func", lambda *args, **kwargs: None):
        yield


def mixed_tokens(models: Any) -> Any:
    mlp = models[0].module.decoder.layers[1].mlp
    real = mlp.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(x + 0.5 * torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 0))[:-1], *args, **kwargs)

    return patch.object(mlp, "forward", forward)


FIRST = "96 tokens, output of layers: decoder.layers.0.self_attention on rank"
FOUND = {
    mixed_tokens: "a sequence, 96 tokens, output of layers: decoder.layers.1.mlp on rank 1, token 48:",
    local_rope: f"a sequence, {FIRST}",
    lambda _: attention_with(attention, window_size=(-1, -1)): f"a sequence, {FIRST} 0, token 10:",
    lambda _: documents_lost(attention): f"a pack of 3, {FIRST} 0, token 32:",
    labels_of_chunks: "a sequence, 96 tokens, gradient at layers: decoder.layers.1.mlp on rank",
    unreduced: "a sequence, 96 tokens, gradient of parameters: ",
}


def with_each_fault(rank: int, world_size: int) -> list[str]:
    row = job(CP2, "boundary", WINDOW)
    harness.start(row)
    said = []
    for fault in (*FOUND, lambda models: nullcontext()):
        models = harness.wrapped(row)
        with fault(models):
            try:
                said.append(str(prove(models)))
            except ProofError as error:
                said.append(str(error))
    assert_refused("prove of a GPTModel without Megatron's DistributedDataParallel", prove, models[0].module)
    return said


def trains_on(rank: int, world_size: int) -> None:
    """A training, with a proof before its first step or without."""
    from megatron.core.pipeline_parallel import schedules

    row = like("plain", CP2, "boundary", config={"hidden_dropout": 0.1}, **TRAINS)
    plain = harness.step(row)
    real, proofs = schedules.get_forward_backward_func, []

    def proving() -> Any:
        run = real()

        def first(**given: Any) -> Any:
            if not proofs:
                proofs.append(None)
                proofs.append(prove(given["model"]))
                COUNTERS.reset()
            return run(**given)

        return first

    with patch.object(schedules, "get_forward_backward_func", proving):
        proved = harness.step(row)
    assert len(proofs) == 2
    assert plain.tokens == proved.tokens
    assert all(torch.equal(x, proved.gradients[name]) for name, x in plain.gradients.items())


def test_every_planted_fault_is_found_in_hybrids_too_and_training_goes_on_as_if_there_had_been_no_proof() -> None:
    _, (one, other), hybrids = run_each(2, trains_on, with_each_fault, hybrid, timeout=170)
    assert one == other
    for clean, faulty in hybrids:
        assert "2 ranks compute what one rank computes" in clean
        assert "output of layers: decoder.layers.0.mixer" in faulty.partition("first difference: ")[2], faulty
    for said, expected in zip(one[:-1], FOUND.values(), strict=True):
        assert expected in said.partition("first difference: ")[2], said
    assert "2 ranks compute what one rank computes" in one[-1]


def hybrid(rank: int, world_size: int) -> list[str]:
    row = like("mask stack", {"cp": world_size}, "boundary", layers="M*M", dtype="float32 of few layers")
    harness.start(row)
    with torch.compiler.set_stance("force_eager"), harness.with_layers(row):
        models = harness.wrapped(row)
        clean = str(prove(models))
        with states_dropped(), pytest.raises(ProofError) as caught:
            prove(models)
    return [clean, str(caught.value)]


def asked_by_a_flag(rank: int, world_size: int) -> list[str]:
    """Megatron's training calls `train_step`; here a stand-in is what it calls."""
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training import training

    from tests.megatron.test_scripts import FLAGS, OURS, build

    order: list[str] = []

    def train_step(forward: Any, data: Any, model: Any, *others: Any, **more: Any) -> None:
        order.append("step")

    def profiled(step: Any) -> Any:
        return functools.wraps(step)(lambda *given, **more: step(*given, **more))

    training.train_step = profiled(train_step)  # by a trainer, before the flag is read
    real = proved_job.prove
    proved_job.prove = lambda models: order.append(str(real(models)))
    _, model = build(f"{FLAGS} {OURS} --dfa-prove --mtp-num-layers 1", add_dfa_arguments)
    model = sharded.wrap("ddp", model.config, model)
    for group in model.bucket_groups:
        group.ddp_config.check_for_nan_in_grad = True  # as scripts do
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    training.train_step = profiled(training.train_step)  # and after it
    for _ in range(2):
        training.train_step(None, None, [model], None)
    assert not MTPLossLoggingHelper.tracker, "the first step's losses would be logged with those of the proof"
    return order


def test_the_flag_proves_a_script_before_its_first_step() -> None:
    pytest.importorskip("megatron.training.models", reason="this megatron-core has no training package")
    for proof, *steps in run_ranks(2, asked_by_a_flag, timeout=120):
        assert "2 ranks compute what one rank computes" in proof
        assert steps == ["step", "step"]
