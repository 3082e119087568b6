"""The self-check's reader of flags against Megatron's own parser, where the installed Megatron-Core has one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from dfa_megatron.argument_file import read_arguments
from dfa_megatron.megatron.selfcheck.read_flags import read
from dfa_megatron.megatron.start.dfa_flags import add_dfa_arguments

FILES = sorted((Path(__file__).parents[2] / "configs" / "megatron").glob("*.args"))
MORE = (
    "--norm-epsilon 1e-6 --num-experts 4 --moe-layer-freq ([1]*3+[0])*2 --fp8-format hybrid --apply-layernorm-1p "
    "--adam-eps 1e-5 --clip-grad 0.5 --moe-router-topk 2 --no-bias-dropout-fusion "
    "--window-size 128,0 --no-rope-freq ([0]*3+[1])*2 --adam-beta2 0.95 --global-batch-size 64 --add-qkv-bias"
)


def megatrons_own(words: list[str]) -> argparse.Namespace:
    # Since 0.19 the wheel has the parser of the scripts; wheels before that have megatron.core alone.
    pytest.importorskip("megatron.training", reason="this Megatron-Core's wheel has no parser")
    from megatron.training.arguments import add_megatron_arguments

    parser = add_dfa_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    return parser.parse_args(words)


@pytest.mark.parametrize("more", ["", MORE], ids=["as shipped", "more flags"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_flag_is_read_as_megatrons_parser_reads_it(path: Path, more: str) -> None:
    words = [*read_arguments(path), *more.split()]
    theirs, ours = vars(megatrons_own(words)), read(words)
    assert not ours.unknown
    renamed = {"num_moe_experts": "num_experts"}
    compared = dict(ours.config) | {n: v for n, v in ours.model.items() if n in theirs}
    compared |= {n: v for n, v in ours.training.items() if n in theirs}
    different = []
    for name, value in compared.items():
        wanted: Any = theirs.get(name, theirs.get(renamed.get(name, name), "not there"))
        if name in ("activation_func", "gated_linear_unit"):
            wanted = theirs["swiglu"] and (value if name == "gated_linear_unit" else "silu")
        if name == "attention_backend":
            wanted = None if wanted.name == "auto" else wanted.name
        if name == "cp_comm_type":
            value = [value]  # a list of one, there
        if value != (list(wanted) if isinstance(wanted, tuple) else wanted):
            different.append(f"{name}: {value!r}, Megatron's {wanted!r}")
    assert not different
