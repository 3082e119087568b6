"""Every option stands in the config of its place, and its names are those of the code."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
import torch

from dfa_megatron import dist_flash_attn_func, names
from dfa_megatron.config import CONFIGS, DistAttentionConfig, MegatronConfig, TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES


def test_each_config_has_the_options_of_its_place_and_names_the_place_of_others() -> None:
    attention, training, megatron = known = [[field.name for field in fields(config)] for config in CONFIGS]
    assert training == [*attention, "checkpoint", "remat_offload", "loss_tile"]
    assert megatron == [*training, "data_layout"]
    for config, names_of_it in zip(CONFIGS, known, strict=True):
        flags = vars(config.add_arguments(argparse.ArgumentParser()).parse_args([]))
        assert set(flags) == {f"dfa_{name}" for name in names_of_it}
        assert set(config.json_schema()["properties"]) == set(names_of_it)
        assert config.from_args(argparse.Namespace(**flags)) == config.of(None) == config()
    with pytest.raises(UnsupportedError, match=r"key 'data_layout'.*an option of MegatronConfig alone"):
        TrainingConfig.from_mapping({"data_layout": "zigzag"})
    with pytest.raises(UnsupportedError, match=r"loss_tile=8.*it must be a TrainingConfig"):
        TrainingConfig.of(MegatronConfig(loss_tile=8))


def test_attention_reads_its_own_options_of_a_frameworks_config() -> None:
    q, k, v = torch.randn(3, 1, 4, 1, 8, dtype=torch.float64)
    ours = dist_flash_attn_func(q, k, v, causal=True, config=TrainingConfig(kernel="reference", loss_tile=2))
    assert torch.equal(ours, dist_flash_attn_func(q, k, v, causal=True, config=DistAttentionConfig(kernel="reference")))


def test_automatic_or_a_number_is_what_flag_json_and_check_take_for_the_degree() -> None:
    parser = DistAttentionConfig.add_arguments(argparse.ArgumentParser())
    for word, value in (("auto", "auto"), ("1", 1), ("8", 8)):
        assert DistAttentionConfig.from_args(parser.parse_args(["--dfa-ulysses-degree", word])).ulysses_degree == value
        assert DistAttentionConfig.from_mapping({"ulysses_degree": value}).ulysses_degree == value
    for wrong in ("0", "-1", "some"):
        with pytest.raises(UnsupportedError, match="ulysses_degree"):
            DistAttentionConfig.from_args(parser.parse_args(["--dfa-ulysses-degree", wrong]))


def test_a_dictionary_in_place_of_options_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="it must be a DistAttentionConfig"):
        dist_flash_attn_func(*torch.ones(3, 1, 2, 1, 8), config={"schedule": "ring"})  # type: ignore[arg-type]


def test_a_tile_of_the_loss_is_off_or_a_number_of_tokens() -> None:
    assert TrainingConfig.from_mapping({"loss_tile": 4096}).loss_tile == 4096
    for wrong in (0, -1, 1.5, True, None, "on"):
        with pytest.raises(UnsupportedError, match=r"loss_tile=.*number from 1"):
            TrainingConfig(loss_tile=wrong)  # type: ignore[arg-type]


def test_the_registry_of_names_is_that_of_the_schedules_and_layouts() -> None:
    assert {"auto", *SCHEDULES} == set(names.SCHEDULES)
    assert {"contiguous", *OWNER_COMPUTES} == set(names.LAYOUTS)
    assert {one.name for one in OWNER_COMPUTES.values()} == {names.OWNER_COMPUTES}
