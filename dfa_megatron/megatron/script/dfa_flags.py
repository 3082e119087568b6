"""Add the `--dfa-*` flags to Megatron's argument parser, in a script of its own too, and read them back."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.replace import replace

_BY_PLACE = {"logits_load_dir": "contiguous", "logits_save_dir": "contiguous", "moe_routing_trace_path": "boundary"}
"""Flags of files that identify tokens by their place on a rank, and the layout in which it is not the batch's."""

Parser = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_dfa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--dfa-*` group. For Megatron: parse_args(extra_args_provider=add_dfa_arguments).

    The layout's default is `boundary` here, because Megatron's scripts slice their data in zigzag order; `contiguous`
    is for a loop that slices its batches with `dfa_megatron.megatron.shard_batch`.
    """
    MegatronConfig.add_arguments(parser)
    parser.set_defaults(dfa_data_layout="boundary")
    parser.add_argument(
        "--dfa-prove",
        action="store_true",
        help="Before the first step, compare the job's ranks with each rank alone on a short random text: loss, "
        "outputs of layers and gradients; a difference ends the run with a table. Less than a minute.",
    )
    return parser


def options_of(args: Any = None) -> MegatronConfig:
    """Return the options on a namespace, else on Megatron's global arguments, else defaults with layout boundary.

    Raises:
        UnsupportedError: a Megatron flag contradicts one of ours.
    """
    args = global_args() if args is None else args
    if args is None:
        return MegatronConfig(data_layout="boundary")
    options = MegatronConfig.from_args(args)
    if not hasattr(args, "dfa_data_layout"):
        options = options.replace(data_layout="boundary")
    _check(args, options)
    return options


def _check(args: Any, options: MegatronConfig) -> None:
    """Refuse flags of a script that would be silently wrong."""
    asked = vars(args)
    ranks = asked.get("context_parallel_size", 1)
    if asked.get("create_attention_mask_in_dataloader") and ranks > 1:
        raise UnsupportedError(
            "an attention mask made in the data loader",
            "attention is causal by construction and would ignore it",
            "--no-create-attention-mask-in-dataloader",
        )
    if asked.get("reset_attention_mask"):
        raise UnsupportedError(
            "--reset-attention-mask",
            "only its mask tensor says where documents end",
            "--dataloader-inter-document-masking, which Megatron-Core has from 0.19 on",
        )
    if asked.get("use_torch_fsdp2") and asked.get("calculate_per_token_loss"):
        raise UnsupportedError(
            "--use-torch-fsdp2 with --calculate-per-token-loss",
            "Megatron does not divide the gradients of PyTorch's FSDP2 by the number of tokens",
            "--use-megatron-fsdp, or no --calculate-per-token-loss",
        )
    for name, layout in _BY_PLACE.items() if ranks > 1 else ():
        if asked.get(name) and options.data_layout == layout:
            raise UnsupportedError(
                f"--{name.replace('_', '-')} in data_layout={layout!r}",
                "its files identify tokens by their place on a rank, which differs from Megatron's own runs",
                "--dfa-data-layout zigzag",
            )


def global_args() -> Any:
    """Return Megatron's global arguments, or None outside its scripts (not every wheel has megatron.training)."""
    try:
        from megatron.training import get_args
    except ImportError:
        return None
    try:
        return get_args()
    except AssertionError:  # "args is not initialized."
        return None


def packing_of_script() -> str:
    """Return how a script cuts packed documents: "" (none), "documents" (zigzag in each) or "rows" (in each row)."""
    args = global_args()
    if getattr(args, "sft", False):
        return "documents"
    return "rows" if getattr(args, "dataloader_inter_document_masking", False) else ""


def prepare(flags: Sequence[str]) -> MegatronConfig:
    """Put our flags into Megatron's parser, and return the options in a script's flags.

    With -h or --help nothing is refused: the script prints its help.
    """
    args = _known(flags)
    options = MegatronConfig.from_args(args)
    if not {"-h", "--help"} & set(flags):
        _check_script(args, options)
    _add_flags()
    return options


def _check_script(args: argparse.Namespace, options: MegatronConfig) -> None:
    if not args.spec or args.spec[0] == "local":
        raise UnsupportedError(
            f"dfa_megatron.launch with{f' --spec {args.spec[0]}' if args.spec else 'out --spec'}",
            "Megatron would build its own attention and ignore the --dfa flags",
            "--spec dfa_megatron.megatron get_spec (in Megatron-Core 0.16: SPEC), or a spec of your own made by "
            "distribute_attention; --transformer-impl local for Megatron's own modules",
        )
    if options.data_layout == "contiguous":
        raise UnsupportedError(
            "--dfa-data-layout contiguous in a script",
            "Megatron slices its batches in zigzag order; contiguous is for loops that slice their own by shard_batch",
            "--dfa-data-layout boundary: tokens come in order where they enter the model",
        )
    if args.yaml_cfg is not None:
        why = "Megatron then takes its settings from the file alone and drops every flag, the --dfa flags as well"
        raise UnsupportedError("--yaml-cfg with dfa_megatron.launch", why, "the same settings as flags")
    if args.use_legacy_models:
        raise UnsupportedError(
            "--use-legacy-models", "those models have no layer specs", "Megatron-Core models, the default"
        )


def _known(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dfa_megatron.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", nargs="*")
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--use-legacy-models", action="store_true")
    return add_dfa_arguments(parser).parse_known_args(list(flags))[0]


def _add_flags() -> None:
    import megatron.core

    try:
        from megatron.training import arguments
        from megatron.training.arguments import add_megatron_arguments  # noqa: F401 - must be there
    except ImportError as error:
        raise UnsupportedError(
            f"megatron.training.arguments.add_megatron_arguments of Megatron-Core {megatron.core.__version__}",
            f"it cannot be imported: {error}",
            "a script in a Megatron-LM clone, or a megatron-core wheel from 0.19 on, which have megatron.training; "
            "distribute_attention and shard_batch in a loop of your own need neither",
        ) from error
    replace(arguments, "add_megatron_arguments", _with_ours)


def _with_ours(megatrons: Parser) -> Parser:
    return lambda parser: _with_printable_help(add_dfa_arguments(megatrons(parser)))


def _with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape a bare % in a help text of Megatron-Core 0.19, which makes --help fail in argparse."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
    return parser
