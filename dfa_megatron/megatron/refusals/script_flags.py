"""Flags of Megatron's scripts that are refused: by the launcher, and when the script builds its model."""

from __future__ import annotations

from dfa_megatron.megatron.refusals.model_config import BOUNDARY, several_ranks
from dfa_megatron.refusals import Refusal, Stage, stated

_GET_SPEC = "--spec dfa_megatron.megatron get_spec"
_SAME_PLACES = "--dfa-data-layout boundary or zigzag, where the places are the same"


def _with_logits(flag: str) -> Refusal:
    return Refusal(
        lambda a: getattr(a, flag) and several_ranks(a) and a.dfa_data_layout == "contiguous",
        f"--{flag.replace('_', '-')} in the contiguous layout",
        "Megatron matches cached logits with tokens by their place on a rank, which differs from its own runs",
        _SAME_PLACES,
        {flag: "logits", "context_parallel_size": 2, "dfa_data_layout": "contiguous"},
    )


ARGS = Stage(
    "Megatron: when a script reads its flags",
    (
        Refusal(
            lambda a: a.create_attention_mask_in_dataloader and several_ranks(a),
            "an attention mask made in the data loader",
            "attention is causal by construction and would ignore it",
            "--no-create-attention-mask-in-dataloader",
            {"create_attention_mask_in_dataloader": True, "context_parallel_size": 2},
        ),
        stated(
            "reset_attention_mask",
            "--reset-attention-mask",
            "only its mask tensor says where documents end",
            "--dataloader-inter-document-masking, which Megatron-Core has from 0.19 on",
        ),
        Refusal(
            lambda a: a.sft and several_ranks(a) and a.dfa_data_layout == "zigzag",
            "--sft in layout {dfa_data_layout!r}",
            "Megatron slices its documents one by one, each in zigzag order",
            "--dfa-data-layout boundary, or dfa_megatron.launch with --dfa-data-layout contiguous",
            {"sft": True, "context_parallel_size": 2, "dfa_data_layout": "zigzag"},
        ),
        _with_logits("logits_load_dir"),
        _with_logits("logits_save_dir"),
        Refusal(
            lambda a: a.moe_routing_trace_path and several_ranks(a) and a.dfa_data_layout == "boundary",
            "--moe-routing-trace-path in the boundary layout",
            "a trace identifies tokens by their place, which differs between the layers and the batch",
            "--dfa-data-layout zigzag, or dfa_megatron.launch with --dfa-data-layout contiguous",
            {"moe_routing_trace_path": "trace", "context_parallel_size": 2},
        ),
        Refusal(
            lambda a: getattr(a.attention_backend, "name", a.attention_backend) == "local",
            "--attention-backend local",
            "Megatron would replace this attention with its own",
            "leaving it out",
            {"attention_backend": "local"},
        ),
        Refusal(
            lambda a: a.use_torch_fsdp2 and a.calculate_per_token_loss,
            "--use-torch-fsdp2 with --calculate-per-token-loss",
            "Megatron does not divide the gradients of PyTorch's FSDP2 by the number of tokens",
            "--use-megatron-fsdp, or no --calculate-per-token-loss",
            {"use_torch_fsdp2": True, "calculate_per_token_loss": True},
        ),
    ),
    BOUNDARY,
)

LAUNCH = Stage(
    "Megatron: when dfa_megatron.launch starts a script",
    (
        Refusal(
            lambda a: a.launched and not a.spec,
            "dfa_megatron.launch without --spec",
            "Megatron would build its own attention and ignore the --dfa flags",
            f"{_GET_SPEC} (up to Megatron-Core 0.18: SPEC), or a spec of your own made by distribute_attention",
            {"launched": True},
        ),
        Refusal(
            lambda a: a.launched and a.dfa_data_layout == "contiguous",
            "--dfa-data-layout contiguous in a script",
            "Megatron slices its batches in zigzag order; contiguous is for loops that slice their own by shard_batch",
            "--dfa-data-layout boundary: tokens come in order where they enter the model",
            {"launched": True, "spec": ["dfa_megatron.megatron"], "dfa_data_layout": "contiguous"},
        ),
        Refusal(
            lambda a: a.spec and a.spec[0] == "local",
            "--spec local",
            "it asks for Megatron's own attention",
            f"{_GET_SPEC}, with --transformer-impl local for Megatron's own modules",
            {"spec": ["local"]},
        ),
        Refusal(
            lambda a: a.yaml_cfg is not None,
            "--yaml-cfg with dfa_megatron.launch",
            "Megatron then takes its settings from the file alone and drops every flag, the --dfa flags as well",
            "the same settings as flags",
            {"yaml_cfg": "model.yaml"},
        ),
        stated(
            "use_legacy_models",
            "--use-legacy-models",
            "those models have no layer specs",
            "Megatron-Core models, the default",
        ),
        stated(
            "missing_module",
            "{missing_module[0]}",
            "there is no module {missing_module[1]}",
            "a script in a Megatron-LM clone, or a megatron-core wheel from 0.17 on, which have megatron.training; "
            "distribute_attention and shard_batch in a loop of your own need neither",
            ("megatron.training.arguments of Megatron-Core 0.16.1", "megatron.training"),
        ),
        stated(
            "missing_function",
            "{missing_function}",
            "there is no such function",
            "Megatron-Core 0.16 to 0.19; with --dfa-data-layout boundary its scripts also run without the launcher",
            "megatron.training.arguments.add_megatron_arguments of Megatron-Core 0.20",
        ),
        stated(
            "no_builder",
            "prove megatron without Megatron's own parser and builders",
            "{no_builder}",
            "a wheel of megatron-core from 0.19 on, or a clone on PYTHONPATH",
            "No module named 'megatron.training.argument_utils'",
        ),
        stated(
            "no_layers",
            "prove megatron without --num-layers or --hybrid-layer-pattern",
            "other layers cannot be made small",
            "--dfa-prove in the job itself",
        ),
        stated(
            "cuda",
            "use_cpu on a machine with CUDA",
            "Megatron's own CUDA calls work there",
            "leaving use_cpu out",
        ),
    ),
    BOUNDARY,
)
