"""`dfa-megatron selfcheck deepspeed DS_CONFIG --model CONFIG`: make the case that the command line asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.selfcheck.shrink import engine_settings
from dfa_megatron.deepspeed.tested_keys import check_settings, check_sizes
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.selfcheck.command import UNSEEN, Words, check_ranks, class_of, read_config
from dfa_megatron.huggingface.selfcheck.shrink import shrink
from dfa_megatron.huggingface.selfcheck.states import tolerance_of
from dfa_megatron.selfcheck.case import Case, Reductions
from dfa_megatron.selfcheck.options import MOST_RANKS, unseen


def case_of(words: Sequence[str]) -> Case:
    """Return the self-check of a DeepSpeed JSON with the block `dist_flash_attention`, and of a transformers config.

    Raises:
        UnsupportedError: the JSON or the model is refused by the package, or cannot be run on a CPU.
    """
    parser = Words(prog="dfa-megatron selfcheck deepspeed", allow_abbrev=False)
    parser.add_argument("settings", metavar="DS_CONFIG", help="DeepSpeed's JSON with the block dist_flash_attention")
    parser.add_argument("--model", metavar="CONFIG", required=True, help="a config.json of transformers, or its folder")
    parser.add_argument("--ranks", type=int, help="that share a sequence, if the JSON does not say it")
    parser.add_argument("--tokens", type=int, help="of your sequences, which a window is a part of")
    args = parser.parse_args(list(words))
    path = args.settings
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedError(path, f"it is no JSON: {error}", "DeepSpeed's configuration") from None
    block = DeepSpeedOptions.enabled_in(settings) if isinstance(settings, dict) else None
    if block is None:
        raise UnsupportedError(
            f"{path} in a self-check",
            "it has no enabled block dist_flash_attention",
            '"dist_flash_attention": {"enabled": true, ...}',
        )
    said = block.size or settings.get("sequence_parallel_size")
    check_sizes("--ranks", args.ranks, said)
    size = said or args.ranks
    if size is None:
        asked = f"{path} without dist_flash_attention.size"
        raise UnsupportedError(asked, "the number of ranks that share a sequence is unknown", "--ranks")
    return make_case(settings, block, read_config(Path(args.model)), size, 2, args.tokens)


def make_case(
    settings: Mapping[str, Any],
    block: DeepSpeedOptions,
    config: Any,
    size: int,
    data_size: int,
    tokens: int | None = None,
) -> Case:
    """Return the case of an engine.

    Args:
        settings: DeepSpeed's JSON, with the block in it.
        config: of the transformers model.
        size: ranks that share a sequence.
        data_size: sequences at a time.
        tokens: of each sequence; None for the longest that the model's config names.

    Raises:
        UnsupportedError: as `case_of`.
    """
    import deepspeed

    check_settings(settings, size)
    check_ranks(f"{KEY}.size", size)
    model = class_of(config)
    reduced = Reductions()
    small = shrink(config, size, block.options.fixed_degree, tokens, reduced)
    data_size = min(2, data_size) if 2 * size <= MOST_RANKS else 1
    reduced.note("sequences at a time", "as the launch says", data_size)
    engine, optimizer = engine_settings(settings, block, size, reduced)
    stage = engine["zero_optimization"]["stage"]
    sections = {"three steps": "three steps"}
    if block.options.checkpoint != "remat" and model.supports_gradient_checkpointing:
        sections["rematerialized"] = "three steps"
    return Case(
        title=f"DeepSpeed {deepspeed.__version__}, ZeRO {stage}, size {size}, {data_size} sequences at a time, "
        f"{config.model_type}, schedule {block.options.schedule}, checkpoint {block.options.checkpoint}",
        ranks=size * data_size,
        measure="dfa_megatron.deepspeed.selfcheck.train:measure",
        settings={"config": small, "engine": engine, "optimizer": optimizer, "size": size, "data_size": data_size},
        sections=sections,
        reduced=reduced,
        unseen=(*unseen(block.options), *UNSEEN),
        facts={"ranks of each attention": str(size)},
        imports=(model.__module__,),
        tolerance=tolerance_of(config),
    )
