"""The public names: exactly these, each where it is documented to be, with the signatures that users rely on.

Every option stands in the config of its place, and its names are those of the code.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import dist_flash_attn_func, names
from dfa_megatron.config import CONFIGS, DistAttentionConfig, MegatronConfig, TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES
from tests.support.arguments import assert_refused

NAMES = {
    *("DistAttentionConfig", "DistFlashAttention", "MegatronConfig", "TrainingConfig", "__version__"),
    *("allow_more_heads_than_tokens", "check_plan", "decode_attn_func", "dist_flash_attn_func"),
    *("dist_flash_attn_varlen_func", "draw", "local_positions", "make_plan", "max_logits", "plan_batches"),
    *("roll_sequence", "shard_sequence", "simulate", "stats", "tree_positions", "unshard_sequence", "with_blocks"),
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(dfa_megatron, name)).parameters)


def test_the_public_names_are_exactly_these_and_explain_themselves() -> None:
    assert set(dfa_megatron.__all__) == set(dir(dfa_megatron)) == NAMES
    assert list(dfa_megatron.__all__) == sorted(dfa_megatron.__all__)
    for name in NAMES - {"__version__"}:
        value = getattr(dfa_megatron, name)
        assert value.__name__ == name
        assert (value.__doc__ or "").strip(), name


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
    config = dfa_megatron.DistAttentionConfig()
    keywords = dict.fromkeys(("causal", "group", "softmax_scale"))
    keywords |= {"window_size": (-1, -1), "softcap": 0.0, "sinks": None, "mask": None, "plan": None}
    keywords |= {"return_lse": False, "layout": "contiguous", "config": config}
    assert list(found)[3:] == [*keywords, "unknown"]
    for name, default in keywords.items():
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, name
        assert found[name].default == default, name


def test_packed_documents_take_every_keyword_of_the_plain_function_but_mask_and_plan() -> None:
    packed, plain = parameters("dist_flash_attn_varlen_func"), parameters("dist_flash_attn_func")
    shared = [name for name in list(plain)[3:] if name not in ("mask", "plan")]
    assert list(packed) == ["q", "k", "v", "cu_seqlens", "lengths", *shared]
    for name in shared:
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
    assert_refused(said, dfa_megatron.dist_flash_attn_func, x, x, x, causal=True, **given)
    assert_refused(said, dfa_megatron.dist_flash_attn_varlen_func, x[0], x[0], x[0], (0, 4), causal=True, **given)


X = torch.zeros(1, 4, 2, 8)
HEADS_FIRST = torch.zeros(1, 8, 1024, 16)
A_LAYOUT = "layout='zigzag' of the functions, data_layout='zigzag' in Megatron"
REFUSED: list[tuple[str, Callable[..., Any]]] = [
    ("cu_seqlens alone", lambda: dfa_megatron.dist_flash_attn_varlen_func(*[X[0]] * 3, (0, 4), (0, 4), 4, 4)),
    *((A_LAYOUT, partial(DistAttentionConfig, schedule=name)) for name in ("zigzag", "head_tail", "striped")),
    (
        r"'head_stages': no option has that name.*q.chunk",
        lambda: DistAttentionConfig.from_mapping({"head_stages": 2}),
    ),
    (r"'shedule': no option has that name.*perhaps 'schedule'", partial(DistAttentionConfig, shedule="ring")),
    ("an option of MegatronConfig alone", partial(TrainingConfig, data_layout="zigzag")),
    (
        r"key 'data_layout'.*an option of MegatronConfig alone",
        lambda: TrainingConfig.from_mapping({"data_layout": "zigzag"}),
    ),
    (r"loss_tile=8.*it must be a TrainingConfig", lambda: TrainingConfig.of(MegatronConfig(loss_tile=8))),
    *(
        (r"loss_tile=.*number from 1", partial(TrainingConfig, loss_tile=wrong))
        for wrong in (0, -1, 1.5, True, None, "on")
    ),
    ("as if heads came before tokens.*transpose", lambda: dist_flash_attn_func(*[HEADS_FIRST] * 3, causal=True)),
    (
        r"mask of type Tensor.*dfa_megatron.masks",
        lambda: dist_flash_attn_func(X, X, X, mask=torch.ones(4, 4, dtype=torch.bool)),  # type: ignore[arg-type]
    ),
    ("it must be a DistAttentionConfig", lambda: dist_flash_attn_func(X, X, X, config={"schedule": "ring"})),
]


@pytest.mark.parametrize(("said", "call"), REFUSED)
def test_what_there_is_not_is_refused_with_what_works(said: str, call: Callable[..., Any]) -> None:
    assert_refused(said, call)


def test_the_package_says_it_is_typed() -> None:
    assert (Path(dfa_megatron.__file__).parent / "py.typed").exists()


def test_the_command_prints_its_version() -> None:
    command = [sys.executable, "-m", "dfa_megatron.cli.main", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"dfa-megatron {dfa_megatron.__version__}"


def test_each_config_has_the_options_of_its_place_and_names_the_place_of_others() -> None:
    attention, training, megatron = known = [[field.name for field in fields(config)] for config in CONFIGS]
    assert training == [*attention, "checkpoint", "remat_offload", "loss_tile"]
    assert megatron == [*training, "data_layout"]
    for config, names_of_it in zip(CONFIGS, known, strict=True):
        flags = vars(config.add_arguments(argparse.ArgumentParser()).parse_args([]))
        assert set(flags) == {f"dfa_{name}" for name in names_of_it}
        assert set(config.json_schema()["properties"]) == set(names_of_it)
        assert config.from_args(argparse.Namespace(**flags)) == config.of(None) == config()


def test_attention_reads_its_own_options_of_a_frameworks_config() -> None:
    q, k, v = torch.randn(3, 1, 4, 1, 8, dtype=torch.float64)
    ours = dist_flash_attn_func(q, k, v, causal=True, config=TrainingConfig(kernel="reference", loss_tile=2))
    assert torch.equal(ours, dist_flash_attn_func(q, k, v, causal=True, config=DistAttentionConfig(kernel="reference")))


def test_automatic_or_a_number_is_what_flag_json_and_check_take_for_the_degree() -> None:
    assert TrainingConfig.from_mapping({"loss_tile": 4096}).loss_tile == 4096
    parser = DistAttentionConfig.add_arguments(argparse.ArgumentParser())
    for word, value in (("auto", "auto"), ("1", 1), ("8", 8)):
        assert DistAttentionConfig.from_args(parser.parse_args(["--dfa-ulysses-degree", word])).ulysses_degree == value
        assert DistAttentionConfig.from_mapping({"ulysses_degree": value}).ulysses_degree == value
    for wrong in ("0", "-1", "some"):
        with pytest.raises(UnsupportedError, match="ulysses_degree"):
            DistAttentionConfig.from_args(parser.parse_args(["--dfa-ulysses-degree", wrong]))


def test_the_registry_of_names_is_that_of_the_schedules_and_layouts() -> None:
    assert {"auto", *SCHEDULES} == set(names.SCHEDULES)
    assert {"contiguous", *OWNER_COMPUTES} == set(names.LAYOUTS)
    assert {one.name for one in OWNER_COMPUTES.values()} == {names.OWNER_COMPUTES}
