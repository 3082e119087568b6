"""Add the `--dfa-*` flags to Megatron's argument parser, and read them back."""

from __future__ import annotations

import argparse
from typing import Any

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError

_BY_PLACE = {"logits_load_dir": "contiguous", "logits_save_dir": "contiguous", "moe_routing_trace_path": "boundary"}
"""Flags of files that identify tokens by their place on a rank, and the layout in which it is not the batch's."""


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
