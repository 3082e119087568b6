"""The JSON block is read strictly; what contradicts it, or does nothing, is refused by name before a group is made."""

from __future__ import annotations

import base64
import inspect
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.config import TrainingConfig
from dfa_megatron.deepspeed.engine import check_call, check_known
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.pipeline import check_clipping
from dfa_megatron.deepspeed.tested_keys import TESTED, check_filled_in, check_settings
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness
from tests.support.models import build
from tests.support.workers import run_ranks


def test_every_option_is_read() -> None:
    block = DeepSpeedOptions.from_mapping(
        {"enabled": True, "size": 4, "checkpoint": "remat", "schedule": "ring", "verify": "off"}
    )
    assert block == DeepSpeedOptions(size=4, options=TrainingConfig(checkpoint="remat", schedule="ring", verify="off"))
    assert DeepSpeedOptions.from_mapping({}) == DeepSpeedOptions()
    assert not DeepSpeedOptions.from_mapping({"enabled": False}).enabled
    assert DeepSpeedOptions.enabled_in({"flops_profiler": {}, "zero_optimization": {}}) is None


BLOCKS: list[tuple[str, Any]] = [
    ("perhaps 'schedule'", {"shedule": "ring"}), ("perhaps 'size'", {"sizes": 2}),
    ("perhaps 'enabled'", {"enable": True}), ("perhaps 'balanced'", {"schedule": "balance"}),
    ("perhaps 'remat'", {"checkpoint": "rematerialize"}), ("one of auto, none, full, remat", {"checkpoint": True}),
    *(("a number of ranks", {"size": size}) for size in ("8", True, 0, 2.0)), ("type bool", {"enabled": "true"}),
    ("must be of type bool", {"checkpoint": "remat", "reentrant": 1}),
    ("an option of MegatronConfig alone", {"data_layout": "zigzag"}), ("it must be a block", True),
    ("reentrant with checkpoint='auto'", {"reentrant": True}),
    ("remat_offload with checkpoint='auto'", {"remat_offload": True}),
]  # fmt: skip
FILES: list[dict[str, Any]] = [
    {"data_parallel_size": 2, "sequence_parallel_size": 2},
    *({"sequence_parallel_size": size} for size in (4, "auto", 2.0)), {"sparse_gradients": True},
    {"gradient_allreduce_op": "sum"}, {"tensor_parallel": {"autotp_size": 2}}, {"hybrid_engine": {"enabled": True}},
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"compile": {"deepcompile": True}},
    {"compile": {"passes": ["autosp"]}}, {"zero_optimization": {"zero_hpz_partition_size": 2}},
    {"zero_optimization": {"mics_shard_size": 2}}, {"zero_optimization": {"zero_quantized_gradients": True}},
    {"activation_checkpointing": {"partition_activations": True}}, {"fp16": {"enabled": True}},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {"data_types": {"grad_accum_dtype": "bf16"}},
    {"communication_data_type": "bf16"}, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    {"expert_parallel": {"enabled": True}}, {"a_parallelism_of_next_year": 2},
]  # fmt: skip
MISSPELLED = (
    *("dist_flash_atention", "dist-flash-attention", "Dist_Flash_Attention", "distflashattn", "dfa", "dfa_size"),
)
ON_HOST: list[tuple[str, dict[str, Any]]] = [
    ("no layer is checkpointed", {}),
    ("on a CPU", {"checkpoint": "remat"}),
    ("both keep", {"checkpoint": "remat", "remat_offload": True}),
]
"""Beside DeepSpeed's own cpu_checkpointing."""
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((message, {KEY: block}, {}) for message, block in BLOCKS),
    *((next(iter(file)), file | {KEY: {"size": 2}}, {}) for file in FILES),
    *((key, {key: {"size": 4}, KEY: {"size": 2}}, {}) for key in MISSPELLED),
    ("scales gradients by ZeRO stage", {KEY: {}}, {"mpu": object()}),
    ("mesh_param", {KEY: {}}, {"mesh_param": (1, 2)}),
    ("different samples", {KEY: {}}, {"training_data": [1]}),
]


@pytest.mark.support("deepspeed", "contradictions in the file are refused by name")
@pytest.mark.parametrize(("message", "config", "arguments"), CALLS, ids=[message for message, *_ in CALLS])
def test_what_contradicts_the_block_is_refused_by_name(message: str, config: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_ds.initialize(model=torch.nn.Linear(1, 1), config=config, **arguments)


@pytest.mark.parametrize("key", MISSPELLED)
def test_a_misspelled_block_is_refused_alone_too(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        DeepSpeedOptions.enabled_in({key: {"size": 4}})


def test_keys_of_deepspeed_are_not_taken_for_the_block() -> None:
    from deepspeed.runtime import config, constants

    names = [value for module in (config, constants) for value in vars(module).values() if isinstance(value, str)]
    keys = {name: 1 for name in names if name.isidentifier() and name.islower()}
    assert len(keys) > 50
    assert DeepSpeedOptions.enabled_in(keys) is None


@pytest.mark.parametrize(
    "path", ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "optimizer.params.lr"]
)
def test_auto_without_trainer_is_refused_by_its_key(path: str) -> None:
    *outer, last = path.split(".")
    settings: Any = {last: "auto"}
    for name in reversed(outer):
        settings = {name: settings}
    with pytest.raises(UnsupportedError, match=f"{path}='auto'"):
        check_filled_in(settings)


def test_defaults_spelled_out_are_no_contradiction() -> None:
    check_settings(
        {
            "sequence_parallel_size": 2,
            "gradient_allreduce_op": "mean",
            "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1},
            "activation_checkpointing": {"partition_activations": False},
            "torch_autocast": {"enabled": False},
            "compile": {"deepcompile": False, "double_buffer": True},
            "tensor_parallel": {"autotp_size": 0, "tp_grain_size": 64},
            "fp16": {"enabled": "auto", "loss_scale_window": 1000},
            "tensorboard": {"enabled": True},
            "$schema": "https://example.com",
        },
        size=2,
    )


def test_the_keys_of_zero_that_pass_are_those_that_tests_set() -> None:
    files = {"stage3_gather_16bit_weights_on_model_save", "offload_param", "offload_optimizer"}
    several = {key for key, values in TESTED["zero_optimization"].items() if not isinstance(values, tuple)}
    here = harness.BUCKETS.keys() | harness.settings(0)["zero_optimization"].keys()
    assert several == here | files | {"round_robin_gradients"}


def test_what_needs_the_parts_of_a_transformers_model_is_refused_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for values in ({"prove": True}, {"loss_tile": 64}):
        with pytest.raises(UnsupportedError, match=rf"dist_flash_attention\.{next(iter(values))}.* a pipeline"):
            check_known(DeepSpeedOptions.from_mapping(values), "a pipeline")
    monkeypatch.setattr("deepspeed.moe.layer.MoE", torch.nn.Linear)
    with pytest.raises(UnsupportedError, match="MoE layers"):
        check_call(torch.nn.Linear(1, 1), mpu=None, mesh_param=None, training_data=None)


def test_initialize_has_deepspeeds_signature() -> None:
    import deepspeed

    ours, theirs = (inspect.signature(f).parameters for f in (dfa_ds.initialize, deepspeed.initialize))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_the_schema_names_every_key_that_is_read() -> None:
    properties = DeepSpeedOptions.json_schema()["properties"][KEY]["properties"]
    shared = set(TrainingConfig.json_schema()["properties"])
    assert set(properties) == {"enabled", "size", "reentrant", "prove", "unlisted"} | shared
    for name, entry in properties.items():
        if "default" in entry:
            DeepSpeedOptions.from_mapping({name: entry["default"]})


def test_the_block_is_found_wherever_deepspeed_takes_its_configuration(tmp_path: Path) -> None:
    wrong = {KEY: {"sizes": 2}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(wrong))
    arguments: list[dict[str, Any]] = [
        {"config": str(path)}, {"config": base64.urlsafe_b64encode(json.dumps(wrong).encode()).decode()},
        {"config_params": wrong}, {"config": wrong, "config_params": {}},
        {"args": SimpleNamespace(deepspeed_config=str(path))}, {"args": SimpleNamespace(deepscale_config=str(path))},
    ]  # fmt: skip
    for given in arguments:
        with pytest.raises(UnsupportedError, match="perhaps 'size'"):
            dfa_ds.initialize(model=torch.nn.Linear(1, 1), **given)


def test_a_version_that_accumulates_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version_patch__", 4)
    with pytest.raises(UnsupportedError, match=r"0\.19\.6 or later"):
        dfa_ds.initialize(model=torch.nn.Linear(1, 1), config={KEY: {}})


@pytest.mark.parametrize(
    ("stage", "clipping", "stages", "refused"),
    [(0, 0.5, 2, True), (0, None, 2, True), (0, 0.0, 2, False), (1, 0.5, 2, False), (0, 0.5, 1, False)],
)
def test_clipping_the_stages_of_a_pipeline_by_the_norm_of_the_first_is_refused(
    stage: int, clipping: float | None, stages: int, refused: bool
) -> None:
    module = SimpleNamespace(topology=lambda: SimpleNamespace(get_dim=lambda axis: stages))
    settings = {} if clipping is None else {"gradient_clipping": clipping}
    with pytest.raises(UnsupportedError, match="for a pipeline at ZeRO 0") if refused else nullcontext():
        check_clipping(module, settings | {"zero_optimization": {"stage": stage}})


def first_line(rank: int, world_size: int) -> list[Any]:
    """What is said of steps; and what an engine is asked for and has not."""
    harness.prepare_worker(rank)
    said: list[Any] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("dfa_megatron.deepspeed.engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for batch in ({"train_batch_size": 4}, {"gradient_accumulation_steps": 3}):
        engine = harness.engine_of(harness.settings(1, world_size) | {"train_micro_batch_size_per_gpu": 2} | batch)
    logger.removeHandler(handler)
    with pytest.raises(UnsupportedError, match=r"engine\.compile"):
        engine.compile()
    with pytest.raises(UnsupportedError, match=r"engine\.deepspeed_io.*data_rank and data_size"):
        engine.deepspeed_io([0, 1])
    for message, block in ON_HOST:
        config = harness.settings(1, 2, **block) | {"activation_checkpointing": {"cpu_checkpointing": True}}
        with pytest.raises(UnsupportedError, match=message):
            dfa_ds.initialize(model=build("Llama"), config=config)
    return said


def test_the_first_line_says_sequences_ranks_and_steps_and_an_engine_refuses_what_it_has_not() -> None:
    (derived, stated), nothing = run_ranks(2, first_line, timeout=120)
    assert nothing == []
    assert derived == (
        "WARNING",
        "attention over sequences on 2 ranks; a step takes 4 sequences: 2 on each of 1 groups of ranks, 2 times "
        "(gradient_accumulation_steps, from train_batch_size)",
    )
    assert stated[0] == "INFO"
    assert "a step takes 6 sequences: 2 on each of 1 groups of ranks, 3 times" in stated[1]
