"""The public names: exactly these, each where it is documented to be, with the signatures that users rely on."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dfa_megatron

NAMES = {
    "DistAttentionConfig",
    "DistFlashAttention",
    "PackPlanner",
    "__version__",
    "check_plan",
    "dist_flash_attn_func",
    "dist_flash_attn_varlen_func",
    "draw",
    "local_positions",
    "make_plan",
    "shard_sequence",
    "simulate",
    "unshard_sequence",
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(dfa_megatron, name)).parameters)


def test_the_public_names_are_exactly_these() -> None:
    assert set(dfa_megatron.__all__) == NAMES
    assert list(dfa_megatron.__all__) == sorted(dfa_megatron.__all__)
    assert set(dir(dfa_megatron)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_public_name_resolves_and_explains_itself(name: str) -> None:
    value = getattr(dfa_megatron, name)
    assert value.__name__ == name
    assert (value.__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'dist_flash_attention'"):
        _ = dfa_megatron.dist_flash_attention


def test_attention_has_the_keywords_of_flash_attn_and_a_group() -> None:
    found = parameters("dist_flash_attn_func")
    assert list(found)[:3] == ["q", "k", "v"]
    keywords = {
        "group": None,
        "causal": True,
        "softmax_scale": None,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "deterministic": False,
        "schedule": "auto",
        "layout": "contiguous",
        "kernel": "auto",
        "return_lse": False,
    }
    for name, default in keywords.items():
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert found[name].default == default, name


def test_packed_documents_take_every_keyword_of_the_plain_function() -> None:
    packed = parameters("dist_flash_attn_varlen_func")
    assert list(packed)[:4] == ["q", "k", "v", "cu_seqlens"]
    for name, parameter in parameters("dist_flash_attn_func").items():
        assert packed[name].default == parameter.default, name


def test_plans_are_made_and_looked_at_with_the_documented_keywords() -> None:
    assert list(parameters("make_plan"))[:2] == ["mask", "ranks"]
    assert {"schedule", "layout"} <= set(parameters("make_plan"))
    assert "max_slots" in parameters("check_plan")
    assert list(parameters("simulate"))[:3] == ["plan", "shape", "hardware"]
    assert "style" in parameters("draw")
    for name in ("shard_sequence", "unshard_sequence"):
        assert {"group", "layout", "dim"} <= set(parameters(name))


def test_the_package_says_it_is_typed() -> None:
    assert (Path(dfa_megatron.__file__).parent / "py.typed").exists()


def test_the_command_prints_its_version() -> None:
    command = [sys.executable, "-m", "dfa_megatron.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"dfa-megatron {dfa_megatron.__version__}"


def test_every_option_that_the_function_takes_reaches_it_by_its_name() -> None:
    options = dfa_megatron.DistAttentionConfig(data_layout="boundary", schedule="ring", deterministic=True)
    keywords = options.keywords()
    assert set(keywords) <= set(inspect.signature(dfa_megatron.dist_flash_attn_func).parameters)
    assert set(keywords) == {spec.name for spec in dataclasses.fields(options)} - {
        "data_layout",
        "remat",
        "remat_offload",
        "checkpoint",
    } | {"layout"}
    assert (keywords["layout"], keywords["schedule"], keywords["deterministic"]) == ("contiguous", "ring", True)
    assert options.replace(data_layout="zigzag").keywords()["layout"] == "zigzag"
