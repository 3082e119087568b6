"""Megatron's own parser takes every argument file of configs/megatron, with and without the launcher's flags."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.launch import expand, read_arguments
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
from tests.support.workers import run_each

pytest.importorskip("megatron.training.arguments", reason="this megatron-core has no training package")

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
FILES = sorted(CONFIGS.glob("*.args"))


def parsed(words: list[str], ranks: str, provider: Any = None) -> Any:
    """The arguments that Megatron's own parser and checks make of these, on so many ranks."""
    from megatron.training.arguments import parse_args, validate_args

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    os.environ.update(RANK="0", WORLD_SIZE=ranks, CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_args(provider)
    validate_args(args, {})
    return args


def every_file(rank: int, world_size: int) -> None:
    from megatron.training.arguments import core_transformer_config_from_args

    for path in FILES:
        model = read_arguments(path)
        for training, more, provider, layout in (
            ("mock", [], None, "boundary"),
            ("pretrain", ["--dfa-data-layout", "zigzag"], add_dfa_arguments, "zigzag"),
        ):
            words = [*model, *read_arguments(CONFIGS / "training" / f"{training}.args"), *more]
            args = parsed(words, model[model.index("--context-parallel-size") + 1], provider)
            assert args.spec[0] == "dfa_megatron.megatron"
            assert args.data_parallel_size == 1
            assert options_of(args).data_layout == layout
            args.apply_rope_fusion = False  # which needs Transformer Engine
            check_config(core_transformer_config_from_args(args), options_of(args))


def on_the_page(rank: int, world_size: int) -> None:
    """The command of docs/prove.md."""
    page = (CONFIGS.parents[1] / "docs" / "prove.md").read_text(encoding="utf-8")
    words = page.partition("pretrain_gpt.py")[2].partition("```")[0].replace("\\\n", " ")
    args = parsed(expand(words.replace("$args", str(CONFIGS)).split()), "8", add_dfa_arguments)
    assert args.dfa_prove
    assert (args.num_layers, args.context_parallel_size, args.seq_length) == (2, 8, 4096)


def test_megatrons_parser_and_checks_take_every_argument_file_and_the_small_model_of_the_page() -> None:
    assert FILES
    run_each(1, on_the_page, every_file)
