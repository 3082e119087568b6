"""The public names: exactly these, each where it is documented to be, with the signatures that users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dfa_megatron

NAMES = {
    "DistAttentionConfig",
    "DistFlashAttention",
    "MegatronConfig",
    "PackPlanner",
    "StepLog",
    "TrainingConfig",
    "__version__",
    "check_plan",
    "dist_flash_attn_func",
    "dist_flash_attn_varlen_func",
    "draw",
    "local_positions",
    "make_plan",
    "shard_sequence",
    "simulate",
    "stats",
    "training_flops",
    "tree_positions",
    "unshard_sequence",
    "with_blocks",
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
        "causal": None,
        "group": None,
        "softmax_scale": None,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "sinks": None,
        "alibi_slopes": None,
        "mask": None,
        "plan": None,
        "return_lse": False,
        "layout": "contiguous",
        "config": dfa_megatron.DistAttentionConfig(),
    }
    assert list(found)[3:] == list(keywords)
    for name, default in keywords.items():
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert found[name].default == default, name


def test_packed_documents_take_every_keyword_of_the_plain_function_but_mask_and_plan() -> None:
    packed, plain = parameters("dist_flash_attn_varlen_func"), parameters("dist_flash_attn_func")
    assert list(packed) == [
        "q",
        "k",
        "v",
        "cu_seqlens",
        *(name for name in list(plain)[3:] if name not in ("mask", "plan")),
    ]
    for name in list(packed)[4:]:
        assert packed[name].default == plain[name].default, name


def test_the_package_says_it_is_typed() -> None:
    assert (Path(dfa_megatron.__file__).parent / "py.typed").exists()


def test_the_command_prints_its_version() -> None:
    command = [sys.executable, "-m", "dfa_megatron.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"dfa-megatron {dfa_megatron.__version__}"
