"""The public names: exactly these, each where it is documented to be, with the signatures that users rely on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.errors import UnsupportedError

NAMES = {
    "DistAttentionConfig",
    "DistFlashAttention",
    "MegatronConfig",
    "TrainingConfig",
    "__version__",
    "allow_more_heads_than_tokens",
    "check_plan",
    "decode_attn_func",
    "dist_flash_attn_func",
    "dist_flash_attn_varlen_func",
    "draw",
    "local_positions",
    "make_plan",
    "max_logits",
    "plan_batches",
    "roll_sequence",
    "shard_sequence",
    "simulate",
    "stats",
    "tree_positions",
    "unshard_sequence",
    "with_blocks",
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(dfa_megatron, name)).parameters)


def test_the_public_names_are_exactly_these() -> None:
    assert set(dfa_megatron.__all__) == NAMES
    assert list(dfa_megatron.__all__) == sorted(dfa_megatron.__all__)
    for name in NAMES:
        getattr(dfa_megatron, name)
    assert set(dir(dfa_megatron)) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_public_name_resolves_and_explains_itself(name: str) -> None:
    value = getattr(dfa_megatron, name)
    assert value.__name__ == name
    assert (value.__doc__ or "").strip()


def test_an_import_loads_no_compiler_and_takes_little_of_torchs_time() -> None:
    """Each in a copy of a process that has imported torch alone."""
    code = """
import os, sys, time
import torch
of_torch, before = time.process_time(), {*sys.modules}
for name in ("attention", "sharding", "loss", "recurrence", "sequence.max_logits"):
    if not (copy := os.fork()):
        began = time.process_time()
        __import__(f"dfa_megatron.{name}")
        new, of_ours = {*sys.modules} - before, time.process_time() - began
        print([*{"torch._dynamo", "sympy", "torch._inductor"} & new], of_ours < 0.6 * of_torch, flush=True)
        os._exit(0)
    os.waitpid(copy, 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split() == ["[]", "True"] * 5


def test_no_call_loads_a_compiler() -> None:
    """It takes seconds, and modules that it loads keep the default group that there is, past its destruction."""
    code = """
import sys
import torch, dfa_megatron
from dfa_megatron.recurrence import dist_conv
from dfa_megatron.sequence.max_logits import max_logits
x = torch.randn(1, 8, 4, 16, requires_grad=True)
dfa_megatron.dist_flash_attn_func(x, x, x, causal=True).sum().backward()
dfa_megatron.dist_flash_attn_varlen_func(x[0], x[0], x[0], (0, 5, 8), causal=True).sum().backward()
dfa_megatron.roll_sequence(x, -1)
max_logits(x, x, causal=True)
dist_conv(lambda x, cu_seqlens: x, x[:, :, 0], 2)
print([name for name in ("torch._dynamo", "torch.distributed.nn") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split("\n")[-2] == "[]"


def test_trees_are_reached_from_the_package() -> None:
    from dfa_megatron import trees

    assert trees.__all__ == ["TreePack", "from_rollouts"]
    names = list(inspect.signature(trees.from_rollouts).parameters)
    assert names == ["token_lists", "loss_masks", "length", "multiple_of", "pad"]


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
        "mask": None,
        "plan": None,
        "return_lse": False,
        "layout": "contiguous",
        "config": dfa_megatron.DistAttentionConfig(),
    }
    assert list(found)[3:] == [*keywords, "unknown"]
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
        "lengths",
        *(name for name in list(plain)[3:] if name not in ("mask", "plan")),
    ]
    for name in list(packed)[5:]:
        assert packed[name].default == plain[name].default, name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dropout_p": 0.1}, "no dropout of attention"),
        ({"attn_mask": None}, "mask=, a value of dfa_megatron.masks"),
        ({"schedule": "ring"}, r"config=DistAttentionConfig\(schedule=\.\.\.\)"),
        ({"windowsize": 3}, "perhaps 'window_size'"),
        ({"cu_seqlens_q": 1, "cu_seqlens_k": 1}, "cu_seqlens alone: global offsets"),
    ],
)
def test_arguments_of_other_packages_are_refused_with_what_says_the_same_here(given: dict[str, Any], said: str) -> None:
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=said):
        dfa_megatron.dist_flash_attn_func(x, x, x, causal=True, **given)
    with pytest.raises(UnsupportedError, match=said):
        dfa_megatron.dist_flash_attn_varlen_func(x[0], x[0], x[0], (0, 4), causal=True, **given)


def test_lengths_by_position_as_flash_attn_takes_them_are_refused() -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(UnsupportedError, match="cu_seqlens alone"):
        dfa_megatron.dist_flash_attn_varlen_func(x, x, x, (0, 4), (0, 4), 4, 4, causal=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["zigzag", "head_tail", "striped"])
def test_a_layout_that_is_given_as_a_schedule_is_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match="layout='zigzag' of the functions, data_layout='zigzag' in Megatron"):
        dfa_megatron.DistAttentionConfig(schedule=name)


def test_an_option_that_there_is_not_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnsupportedError, match=r"'head_stages': no option has that name.*q.chunk"):
        dfa_megatron.DistAttentionConfig.from_mapping({"head_stages": 2})
    with pytest.raises(UnsupportedError, match=r"'shedule': no option has that name.*perhaps 'schedule'"):
        dfa_megatron.DistAttentionConfig(shedule="ring")  # type: ignore[call-arg]
    with pytest.raises(UnsupportedError, match="an option of MegatronConfig alone"):
        dfa_megatron.TrainingConfig(data_layout="zigzag")  # type: ignore[call-arg]


def test_heads_before_tokens_and_tensors_for_masks_are_refused() -> None:
    x = torch.zeros(1, 8, 1024, 16)
    with pytest.raises(UnsupportedError, match=r"as if heads came before tokens.*transpose"):
        dfa_megatron.dist_flash_attn_func(x, x, x, causal=True)
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=r"mask of type Tensor.*dfa_megatron.masks"):
        dfa_megatron.dist_flash_attn_func(x, x, x, mask=torch.ones(4, 4, dtype=torch.bool))  # type: ignore[arg-type]


def test_the_package_says_it_is_typed() -> None:
    assert (Path(dfa_megatron.__file__).parent / "py.typed").exists()


def test_the_command_prints_its_version() -> None:
    command = [sys.executable, "-m", "dfa_megatron.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"dfa-megatron {dfa_megatron.__version__}"
