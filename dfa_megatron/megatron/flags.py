"""The `--dfa-*` flags in Megatron's argument parser, and reading them back."""

from __future__ import annotations

import argparse
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError


def add_dfa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--dfa-*` group. For Megatron: parse_args(extra_args_provider=add_dfa_arguments).

    The layout's default is `boundary` here, because Megatron's scripts slice their data in zigzag order; `contiguous`
    is for a loop that slices its batches with `dfa_megatron.megatron.shard_batch`.
    """
    DistAttentionConfig.add_arguments(parser)
    parser.set_defaults(dfa_layout="boundary")
    return parser


def options_of(args: Any = None) -> DistAttentionConfig:
    """The options on a namespace, else on Megatron's global arguments, else the defaults with layout boundary.

    Raises:
        UnsupportedError: a flag of Megatron's that does not go with ours.
    """
    args = global_args() if args is None else args
    if args is None:
        return DistAttentionConfig(layout="boundary")
    check_args(args)
    options = DistAttentionConfig.from_args(args)
    return options if hasattr(args, "dfa_layout") else options.replace(layout="boundary")


def global_args() -> Any:
    """Megatron's global argument namespace, or None outside its scripts (megatron.training is not in every wheel)."""
    try:
        from megatron.training import get_args
    except ImportError:
        return None
    try:
        return get_args()
    except AssertionError:  # "args is not initialized."
        return None


def check_args(args: Any) -> None:
    """Refuse flags of Megatron's scripts that the model itself would never see.

    Raises:
        UnsupportedError: naming the flag and what works.
    """
    if getattr(args, "create_attention_mask_in_dataloader", False) and getattr(args, "context_parallel_size", 1) > 1:
        raise UnsupportedError(
            "an attention mask made in the data loader",
            "attention is causal by construction and would ignore it",
            "--no-create-attention-mask-in-dataloader",
        )
    if getattr(args, "reset_attention_mask", False):
        raise UnsupportedError(
            "--reset-attention-mask", "attention does not stop at document ends yet", "leaving it out"
        )
    if getattr(getattr(args, "attention_backend", None), "name", None) == "local":
        raise UnsupportedError(
            "--attention-backend local", "Megatron would put its own attention in place of this one", "leaving it out"
        )
