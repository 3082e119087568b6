"""The JSON block is read strictly, and what contradicts it elsewhere in the file is refused by name."""

from __future__ import annotations

import base64
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.config import TrainingConfig
from dfa_megatron.deepspeed.engine import check_call, check_known
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.tested_keys import TESTED, check_settings
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness


def test_every_option_is_read() -> None:
    block = DeepSpeedOptions.from_mapping(
        {"enabled": True, "size": 4, "checkpoint": "remat", "schedule": "ring", "verify": "off"}
    )
    assert block == DeepSpeedOptions(size=4, options=TrainingConfig(checkpoint="remat", schedule="ring", verify="off"))
    assert DeepSpeedOptions.from_mapping({}) == DeepSpeedOptions()
    assert not DeepSpeedOptions.from_mapping({"enabled": False}).enabled
    assert DeepSpeedOptions.enabled_in({"flops_profiler": {}, "zero_optimization": {}}) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shedule": "ring"}, "perhaps 'schedule'"),
        ({"sizes": 2}, "perhaps 'size'"),
        ({"enable": True}, "perhaps 'enabled'"),
        ({"schedule": "balance"}, "perhaps 'balanced'"),
        ({"checkpoint": "rematerialize"}, "perhaps 'remat'"),
        ({"checkpoint": True}, "one of auto, none, full, remat"),
        ({"size": "8"}, "a number of ranks"),
        ({"size": True}, "a number of ranks"),
        ({"size": 0}, "a number of ranks"),
        ({"size": 2.0}, "a number of ranks"),
        ({"enabled": "true"}, "type bool"),
        ({"data_layout": "zigzag"}, "an option of MegatronConfig alone"),
        (True, "it must be a block"),
    ],
)
def test_a_wrong_block_is_refused_with_what_would_be_right(values: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DeepSpeedOptions.from_mapping(values)


@pytest.mark.support("deepspeed", "contradictions in the file are refused by name")
@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2, "sequence_parallel_size": 2},
        {"sequence_parallel_size": 4},
        {"sequence_parallel_size": "auto"},
        {"sequence_parallel_size": 2.0},
        {"sparse_gradients": True},
        {"gradient_allreduce_op": "sum"},
        {"tensor_parallel": {"autotp_size": 2}},
        {"hybrid_engine": {"enabled": True}},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"compile": {"deepcompile": True}},
        {"compile": {"passes": ["autosp"]}},
        {"zero_optimization": {"zero_hpz_partition_size": 2}},
        {"zero_optimization": {"mics_shard_size": 2}},
        {"zero_optimization": {"zero_quantized_gradients": True}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"fp16": {"enabled": True}},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"communication_data_type": "bf16"},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        {"expert_parallel": {"enabled": True}},
        {"a_parallelism_of_next_year": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_contradiction_elsewhere_in_the_file_is_refused_by_name(settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(UnsupportedError, match=name):
        check_settings(settings, size=2)
    with pytest.raises(UnsupportedError, match=name):
        dfa_ds.initialize(model=torch.nn.Linear(1, 1), config={**settings, KEY: {"size": 2}})


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mpu": object()}, "scales gradients by ZeRO stage"),
        ({"mesh_param": (1, 2)}, "mesh_param"),
        ({"training_data": [1]}, "different samples"),
    ],
)
def test_an_argument_that_contradicts_the_block_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_ds.initialize(model=torch.nn.Linear(1, 1), config={KEY: {}}, **arguments)


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
    encoded = base64.urlsafe_b64encode(json.dumps(wrong).encode()).decode()
    arguments: list[dict[str, Any]] = [
        {"config": wrong},
        {"config": str(path)},
        {"config": encoded},
        {"config_params": wrong},
        {"config": wrong, "config_params": {}},
        {"args": SimpleNamespace(deepspeed_config=str(path))},
        {"args": SimpleNamespace(deepscale_config=str(path))},
    ]
    for given in arguments:
        with pytest.raises(UnsupportedError, match="perhaps 'size'"):
            dfa_ds.initialize(model=torch.nn.Linear(1, 1), **given)


def test_a_version_that_accumulates_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version_patch__", 4)
    with pytest.raises(UnsupportedError, match=r"0\.19\.6 or later"):
        dfa_ds.initialize(model=torch.nn.Linear(1, 1), config={KEY: {}})
