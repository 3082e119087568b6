"""A transformers model made small, for `dfa-megatron prove huggingface`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.distribute import distribute_attention
from dfa_megatron.huggingface.proof import prove
from dfa_megatron.huggingface.small.shrink import shrink
from dfa_megatron.proving import Proof
from dfa_megatron.proving.job import TOKENS
from dfa_megatron.proving.small_job import MOST_RANKS, Reductions, SmallJob, enlarge, on_cpu


def small_job(words: Sequence[str]) -> SmallJob:
    """Read a command line.

    Raises:
        UnsupportedError: there is no causal language model of that type or file, or an option is refused.
    """
    parser = argparse.ArgumentParser(prog="dfa-megatron prove huggingface", allow_abbrev=False)
    parser.add_argument("config", metavar="TYPE_OR_CONFIG", help="'qwen3', or a config.json of transformers")
    parser.add_argument("--ranks", type=int, default=2, help="that share a sequence (2)")
    parser.add_argument(
        "--tokens", type=int, help="of your sequences, which a window is a part of; 48 a rank are checked"
    )
    parser.add_argument("--reentrant", action="store_true", help="as in distribute_attention")
    args = TrainingConfig.add_arguments(parser).parse_args(list(words))
    reduced = Reductions()
    options = TrainingConfig.from_args(args)
    options = options.replace(**on_cpu(options, reduced))
    config, ranks = small_config(args.config, args.ranks, options, args.tokens, reduced)

    def run() -> Proof:
        return prove(distribute_attention(model_of(config), config=options, reentrant=args.reentrant))

    return SmallJob(ranks, reduced, run)


def small_config(
    source: str, ranks: int, options: TrainingConfig, tokens: int | None, reduced: Reductions
) -> tuple[Any, int]:
    """Return the small config of a type's default or of a file, and the ranks that share a sequence.

    Raises:
        OSError: the file cannot be read.
        UnsupportedError: there is no causal language model of it, or it is multimodal.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    values: dict[str, Any] = {"model_type": source}
    if source not in CONFIG_MAPPING:
        path = Path(source)
        try:
            values = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedError(source, f"it is no JSON: {error}", "a config.json of transformers") from error
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        what = f"{source} with model_type {kind!r}"
        raise UnsupportedError(what, "transformers has no such type", "a config of a type that it has")
    config = CONFIG_MAPPING[kind].from_dict(values)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.get_text_config() is not config:
        what, why = f"a {kind} model", "it is no causal language model, or is multimodal"
        raise UnsupportedError(what, why, "a decoder's config, such as the text_config in the file")
    few = max(1, min(ranks, MOST_RANKS))
    reduced.note("ranks that share a sequence", ranks, few)
    small = shrink(config, TOKENS * few, options.fixed_degree, tokens, reduced)
    return type(config).from_dict(small), few


def model_of(config: Any) -> Any:
    """Return the model in float32, in training mode, with eager attention, the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    enlarge(model)
    return model.train()
