"""Every option says where it can be set, and its names are those of the code."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest
import torch

from dfa_megatron import dist_flash_attn_func, names
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES


def test_every_option_says_where_it_can_be_set_and_the_others_are_refused_there() -> None:
    scopes = {field.name: set(field.metadata["scope"]) for field in fields(DistAttentionConfig)}
    assert all(scopes.values())
    apart = {name: scope for name, scope in scopes.items() if scope != set(names.SCOPES)}
    assert apart == {
        "data_layout": {"megatron"},
        "checkpoint": {"megatron", "deepspeed", "huggingface"},
        "remat_offload": {"megatron", "deepspeed", "huggingface"},
        "loss_tile": {"megatron", "deepspeed", "huggingface"},
        "mlp_tile": {"megatron", "deepspeed", "huggingface"},
    }
    config = DistAttentionConfig(data_layout="boundary", schedule="ring")
    assert config.within("function") == DistAttentionConfig(schedule="ring")
    config.refuse_outside("megatron", "nothing")
    with pytest.raises(UnsupportedError, match=r"data_layout='boundary'.*an option of megatron alone"):
        config.refuse_outside("function", "its default")
    with pytest.raises(UnsupportedError, match=r"key 'data_layout'.*an option of megatron alone"):
        DistAttentionConfig.from_mapping({"data_layout": "zigzag"}, "deepspeed")
    for scope in names.SCOPES:
        flags = vars(DistAttentionConfig.add_arguments(argparse.ArgumentParser(), scope).parse_args([]))
        assert set(flags) == {f"dfa_{name}" for name, where in scopes.items() if scope in where}
    assert set(DistAttentionConfig.json_schema("deepspeed")["properties"]) == {
        name for name, scope in scopes.items() if "deepspeed" in scope
    }


def test_automatic_or_a_number_is_what_flag_json_and_check_take_for_the_degree() -> None:
    parser = DistAttentionConfig.add_arguments(argparse.ArgumentParser(), "megatron")
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
    assert DistAttentionConfig.from_mapping({"loss_tile": 4096}, "deepspeed").loss_tile == 4096
    for wrong in (0, -1, 1.5, True, None, "on"):
        with pytest.raises(UnsupportedError, match=r"loss_tile=.*number from 1"):
            DistAttentionConfig(loss_tile=wrong)  # type: ignore[arg-type]


def test_the_registry_of_names_is_that_of_the_schedules_and_layouts() -> None:
    assert {"auto", *SCHEDULES} == set(names.SCHEDULES)
    assert {"contiguous", *OWNER_COMPUTES} == set(names.LAYOUTS)
    assert {one.name for one in OWNER_COMPUTES.values()} == {names.OWNER_COMPUTES}
