"""The `--dfa-*` flags in Megatron's argument parser, and reading them back."""

from __future__ import annotations

import argparse
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.refusals import Refusal


def add_dfa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--dfa-*` group. For Megatron: parse_args(extra_args_provider=add_dfa_arguments).

    The layout's default is `boundary` here, because Megatron's scripts slice their data in zigzag order; `contiguous`
    is for a loop that slices its batches with `dfa_megatron.megatron.shard_batch`.
    """
    DistAttentionConfig.add_arguments(parser)
    parser.set_defaults(dfa_data_layout="boundary")
    parser.add_argument(
        "--dfa-selfcheck",
        action="store_true",
        help="Before training, compare many ranks with one on rank 0's CPU, with a small model of these flags; a "
        "difference ends the run with a table. As `dfa-megatron selfcheck megatron` with the same flags.",
    )
    return parser


def options_of(args: Any = None) -> DistAttentionConfig:
    """The options on a namespace, else on Megatron's global arguments, else the defaults with layout boundary.

    Raises:
        UnsupportedError: a flag of Megatron's that does not go with ours.
    """
    args = global_args() if args is None else args
    if args is None:
        return DistAttentionConfig(data_layout="boundary")
    options = DistAttentionConfig.from_args(args)
    if not hasattr(args, "dfa_data_layout"):
        options = options.replace(data_layout="boundary")
    check_args(args, options)
    return options


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


def packs_of_args() -> str:
    """How a Megatron script cuts packed documents: "" (none), "documents" (zigzag in each) or "rows" (in each row)."""
    args = global_args()
    if getattr(args, "sft", False):
        return "documents"
    return "rows" if getattr(args, "dataloader_inter_document_masking", False) else ""


_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
"""Flags of hybrid models, by version; their experts are in layers that see Megatron's own order."""

FLAG_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda args, options: (
            getattr(args, "create_attention_mask_in_dataloader", False)
            and getattr(args, "context_parallel_size", 1) > 1
        ),
        "an attention mask made in the data loader",
        "attention is causal by construction and would ignore it",
        "--no-create-attention-mask-in-dataloader",
    ),
    Refusal(
        lambda args, options: getattr(args, "reset_attention_mask", False),
        "--reset-attention-mask",
        "it says where documents end in a mask tensor only",
        "--dataloader-inter-document-masking, which Megatron-Core has from 0.19 on",
    ),
    Refusal(
        lambda args, options: bool(
            getattr(args, "sft", False)
            and getattr(args, "context_parallel_size", 1) > 1
            and options.data_layout != "contiguous"
        ),
        "--sft in this layout",
        "Megatron slices its documents one by one, each in zigzag order",
        "dfa_megatron.launch with --dfa-data-layout contiguous",
    ),
    Refusal(
        lambda args, options: bool(
            (getattr(args, "logits_load_dir", None) or getattr(args, "logits_save_dir", None))
            and getattr(args, "context_parallel_size", 1) > 1
            and options.data_layout == "contiguous"
        ),
        "--logits-load-dir or --logits-save-dir in the contiguous layout",
        "Megatron matches cached logits with tokens by their place on a rank, which is another in its own runs, and in "
        "those of other layouts",
        "--dfa-data-layout boundary or zigzag, where it is the same",
    ),
    Refusal(
        lambda args, options: bool(
            getattr(args, "moe_routing_trace_path", None)
            and getattr(args, "context_parallel_size", 1) > 1
            and options.data_layout == "boundary"
            and not any(getattr(args, name, None) for name in _HYBRID)
        ),
        "--moe-routing-trace-path in the boundary layout",
        "a trace tells tokens by their place, and those in the layers have another than those of the batch",
        "--dfa-data-layout zigzag, or dfa_megatron.launch with --dfa-data-layout contiguous",
    ),
    Refusal(
        lambda args, options: getattr(getattr(args, "attention_backend", None), "name", None) == "local",
        "--attention-backend local",
        "Megatron would put its own attention in place of this one",
        "leaving it out",
    ),
    Refusal(
        lambda args, options: bool(
            getattr(args, "use_torch_fsdp2", False) and getattr(args, "calculate_per_token_loss", False)
        ),
        "--use-torch-fsdp2 with --calculate-per-token-loss",
        "Megatron does not divide the gradients of PyTorch's FSDP2 by the number of tokens",
        "--use-megatron-fsdp, or no --calculate-per-token-loss",
    ),
)
"""Flags of Megatron's scripts that the model itself would never see."""


def check_args(args: Any, options: DistAttentionConfig) -> None:
    """Refuse flags of Megatron's scripts that the model itself would never see.

    Raises:
        UnsupportedError: naming the flag and what works.
    """
    for refusal in FLAG_REFUSALS:
        if refusal.applies(args, options):
            raise UnsupportedError(refusal.what, refusal.why, refusal.instead)
