"""`dfa-megatron selfcheck huggingface CONFIG`: the words of the command line, and the case that they ask for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.refusals import MODEL, SELFCHECK
from dfa_megatron.huggingface.selfcheck.shrink import shrink
from dfa_megatron.selfcheck.case import Case, Reduction, Section
from dfa_megatron.selfcheck.options import SECONDS_OF_A_RANK, on_cpu, unseen

UNSEEN = ("packed documents, padding and adapters: each row is one document",)


class Words(argparse.ArgumentParser):
    """A parser whose errors are refusals, as everywhere in this package."""

    def error(self, message: str) -> Any:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        SELFCHECK.check(command_error=message, usage=self.format_usage().strip())


def case_of(words: Sequence[str]) -> Case:
    """The self-check of a transformers config.

    Raises:
        UnsupportedError: it is no config of a decoder that this package takes, or an option is refused.
    """
    parser = Words(prog="dfa-megatron selfcheck huggingface", allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", help="a config.json of transformers, or its folder")
    parser.add_argument("--ranks", type=int, default=2, help="that share a sequence (2)")
    parser.add_argument("--tokens", type=int, help="of your sequences, which a window is a part of")
    parser.add_argument("--reentrant", action="store_true", help="as in distribute_attention")
    args = DistAttentionConfig.add_arguments(parser, scope="huggingface").parse_args(list(words))
    options = DistAttentionConfig.from_args(args)
    MODEL.check(options, reentrant=args.reentrant)
    check_ranks(args.ranks, "--ranks")
    config = read_config(Path(args.config))
    reduced: list[Reduction] = []
    small = shrink(config, args.ranks, options.fixed_degree, args.tokens, reduced)
    settings = {
        "config": small,
        "ranks": args.ranks,
        "options": on_cpu(options, "--dfa-", reduced),
        "reentrant": args.reentrant,
    }
    sections = [Section("plain", "plain"), Section("three steps", "three steps")]
    lines = [*unseen(options), *UNSEEN]
    if (model := class_of(config)).supports_gradient_checkpointing:
        sections.insert(1, Section("rematerialized", "plain"))
    else:
        lines.append("rematerialization: transformers does not checkpoint these layers")
    return Case(
        title=f"{versions()}, {config.model_type}, schedule {options.schedule}, checkpoint {options.checkpoint}",
        ranks=args.ranks,
        measure="dfa_megatron.huggingface.selfcheck.train:measure",
        settings=settings,
        sections=tuple(sections),
        reduced=tuple(reduced),
        unseen=tuple(lines),
        facts={"ranks of each attention": str(args.ranks)},
        imports=(model.__module__,),
        timeout=max(300.0, SECONDS_OF_A_RANK * args.ranks),
    )


def versions() -> str:
    """Of transformers, in words."""
    import transformers

    return f"transformers {transformers.__version__}"


def check_ranks(ranks: int, name: str) -> None:
    """Refuse more ranks than a check runs; their number is never reduced."""
    SELFCHECK.check(ranks=ranks, source=name)


def read_config(path: Path) -> Any:
    """The configuration in a file or folder; nothing is fetched, and no code beside it runs.

    Raises:
        OSError: it cannot be read.
        UnsupportedError: it is not a configuration of a type that transformers has, or one of several parts.
    """
    from transformers import CONFIG_MAPPING

    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values.get("model_type")
    except (ValueError, AttributeError) as error:
        SELFCHECK.check(no_json=error, path=path)
    SELFCHECK.check(unknown_type=None if kind in CONFIG_MAPPING else str(kind), path=path, version=versions())
    return CONFIG_MAPPING[kind].from_dict(values)


def class_of(config: Any) -> Any:
    """The class of transformers' causal language model for a configuration.

    Raises:
        UnsupportedError: there is none, or the configuration has several parts.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = f"a {config.model_type} model"
    several = config.get_text_config() is not config
    SELFCHECK.check(kind=kind, several_parts=several, no_language_model=type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
