"""Megatron's own parser takes every argument file of configs/megatron, with and without the launcher's flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dfa_megatron.launch import expand, read_arguments
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
from tests.support.workers import run_each

pytest.importorskip("megatron.training.arguments", reason="this megatron-core has no training package")

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
FILES = sorted(CONFIGS.glob("*.args"))


def parse_and_validate(rank: int, world_size: int) -> list[str]:
    from megatron.training.arguments import parse_args, validate_args

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    taken = []
    for path in FILES:
        model = read_arguments(path)
        ranks = model[model.index("--context-parallel-size") + 1]
        os.environ.update(RANK="0", WORLD_SIZE=ranks, CUDA_DEVICE_MAX_CONNECTIONS="1")
        for training, more, provider, layout in (
            ("mock", [], None, "boundary"),
            ("pretrain", ["--dfa-data-layout", "zigzag"], add_dfa_arguments, "zigzag"),
        ):
            sys.argv = [path.name, *model, *read_arguments(CONFIGS / "training" / f"{training}.args"), *more]
            args = parse_args(provider)
            validate_args(args, {})
            assert args.spec[0] == "dfa_megatron.megatron"
            assert args.data_parallel_size == 1
            assert options_of(args).data_layout == layout
        taken.append(path.name)
    return taken


def on_the_page(rank: int, world_size: int) -> None:
    """Parse the command of docs/prove.md with Megatron's own parser."""
    from megatron.training.arguments import parse_args, validate_args

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    page = (CONFIGS.parents[1] / "docs" / "prove.md").read_text(encoding="utf-8")
    words = page.partition("pretrain_gpt.py")[2].partition("```")[0].replace("\\\n", " ")
    sys.argv = ["pretrain_gpt.py", *expand(words.replace("$args", str(CONFIGS)).split())]
    os.environ.update(RANK="0", WORLD_SIZE="8", CUDA_DEVICE_MAX_CONNECTIONS="1")
    args = parse_args(add_dfa_arguments)
    validate_args(args, {})
    assert args.dfa_prove
    assert (args.num_layers, args.context_parallel_size, args.seq_length) == (2, 8, 4096)


def test_megatrons_parser_and_checks_take_the_small_model_of_the_page_and_every_argument_file() -> None:
    _, (taken,) = run_each(1, on_the_page, parse_and_validate)
    assert taken == [path.name for path in FILES]
    assert taken
