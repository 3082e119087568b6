"""`dfa-megatron selfcheck huggingface CONFIG`: make the case that the command line asks for."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checkpointing import check_options
from dfa_megatron.huggingface.selfcheck.shrink import shrink
from dfa_megatron.huggingface.selfcheck.states import tolerance_of
from dfa_megatron.selfcheck.case import Case, Reductions
from dfa_megatron.selfcheck.options import MOST_SEQUENCE_RANKS, on_cpu, unseen

UNSEEN = ("packed documents, padding and adapters: each row is one document",)


class Words(argparse.ArgumentParser):
    """A parser whose errors are refusals, as everywhere in this package."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: always.
        """
        usage = self.format_usage().strip()
        raise UnsupportedError("this command line", message, usage)


def case_of(words: Sequence[str]) -> Case:
    """Return the self-check of a transformers config.

    Raises:
        UnsupportedError: it is no config of a decoder that this package takes, or an option is refused.
    """
    parser = Words(prog="dfa-megatron selfcheck huggingface", allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG", help="a config.json of transformers, or its folder")
    parser.add_argument("--ranks", type=int, default=2, help="that share a sequence (2)")
    parser.add_argument("--tokens", type=int, help="of your sequences, which a window is a part of")
    parser.add_argument("--reentrant", action="store_true", help="as in distribute_attention")
    args = DistAttentionConfig.add_arguments(parser, "huggingface").parse_args(list(words))
    options = DistAttentionConfig.from_args(args)
    check_options(options, reentrant=args.reentrant)
    check_ranks("--ranks", args.ranks)
    config = read_config(Path(args.config))
    reduced = Reductions()
    small = shrink(config, args.ranks, options.fixed_degree, args.tokens, reduced)
    settings = {
        "config": small,
        "ranks": args.ranks,
        "options": on_cpu(options, "--dfa-", reduced),
        "reentrant": args.reentrant,
    }
    sections = {"plain": "plain", "rematerialized": "plain", "three steps": "three steps"}
    lines = [*unseen(options), *UNSEEN]
    if not (model := class_of(config)).supports_gradient_checkpointing:
        del sections["rematerialized"]
        lines.append("rematerialization: transformers does not checkpoint these layers")
    return Case(
        title=f"{versions()}, {config.model_type}, schedule {options.schedule}, checkpoint {options.checkpoint}",
        ranks=args.ranks,
        measure="dfa_megatron.huggingface.selfcheck.train:measure",
        settings=settings,
        sections=sections,
        reduced=reduced,
        unseen=lines,
        facts={"ranks of each attention": str(args.ranks)},
        imports=(model.__module__,),
        tolerance=tolerance_of(config),
    )


def check_ranks(source: str, ranks: int) -> None:
    """Refuse more processes than a self-check starts.

    Raises:
        UnsupportedError: names the source of the number.
    """
    if not 1 <= ranks <= MOST_SEQUENCE_RANKS:
        raise UnsupportedError(
            f"{source} {ranks} in a self-check",
            f"it runs at most {MOST_SEQUENCE_RANKS} processes, and the ranks of a sequence are never reduced",
            f"a number from 1 to {MOST_SEQUENCE_RANKS}",
        )


def versions() -> str:
    """Return the name and version of transformers."""
    import transformers

    return f"transformers {transformers.__version__}"


def read_config(path: Path) -> Any:
    """Read the configuration in a file or folder; nothing is fetched, and no code beside it runs.

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
        raise UnsupportedError(str(path), f"it is no JSON object: {error}", "a config.json of transformers") from None
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"{path} with model_type {str(kind)!r}", f"{versions()} has no such type", "a config of a type that it has"
        )
    return CONFIG_MAPPING[kind].from_json_file(path)


def class_of(config: Any) -> Any:
    """Return the class of transformers' causal language model for a configuration.

    Raises:
        UnsupportedError: there is none, or the configuration has several parts.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = f"a {config.model_type} model"
    if config.get_text_config() is not config:
        raise UnsupportedError(f"{kind} with several parts", "only text is distributed", "its text_config in a file")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(kind, "transformers has no causal language model of it", "a decoder-only model")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
