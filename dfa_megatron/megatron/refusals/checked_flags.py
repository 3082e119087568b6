"""Flags that a self-check refuses: it cannot read them, or cannot run them on a CPU."""

from __future__ import annotations

from dfa_megatron.megatron.refusals.model_config import BOUNDARY
from dfa_megatron.refusals import Refusal, Stage, stated
from dfa_megatron.selfcheck.options import MOST_SEQUENCE_RANKS

SELFCHECK = Stage(
    "Megatron: when a self-check is made",
    (
        stated(
            "unknown_flag",
            "{unknown_flag}",
            "no option has that name",
            "{nearest}",
            "--dfa-shedule",
            nearest="perhaps '--dfa-schedule'",
        ),
        stated(
            "no_process_group",
            "--dfa-selfcheck before the process group exists",
            "its outcome could not be sent to every rank",
            "a spec made after Megatron's initialization, or `dfa-megatron selfcheck megatron` with these flags",
        ),
        stated(
            "missing_flag",
            "flags without {missing_flag}",
            "the model needs it",
            "all flags of the script, or @FILE",
            "--num-layers",
        ),
        stated(
            "stray_word",
            "{stray_word!r} before any flag",
            "flags of Megatron begin with --",
            "--flag value",
            "gpt",
        ),
        stated(
            "no_pattern",
            "{no_pattern}",
            "it is no pattern of layers",
            "a number, or a list such as ([1]*3+[0])*2",
            "--moe-layer-freq three",
        ),
        Refusal(
            lambda a: a.spec and a.spec[0] != "dfa_megatron.megatron",
            "--spec {spec[0]} in a self-check",
            "flags do not show the code that makes a spec of your own",
            "--spec dfa_megatron.megatron get_spec with the same flags",
            {"spec": ["my_model"]},
        ),
        Refusal(
            lambda a: a.experimental_attention_variant and not a.linear_attention_freq,
            "--experimental-attention-variant {experimental_attention_variant} by itself in a self-check",
            "which layers have it is unknown",
            "--linear-attention-freq as well",
            {"experimental_attention_variant": "gated_delta_net"},
        ),
        Refusal(
            lambda a: a.spec and "hybrid_stack_spec" in a.spec and not a.hybrid_pattern,
            "a hybrid model without a pattern in a self-check",
            "its kinds of layers are unknown",
            "--hybrid-layer-pattern (up to Megatron-Core 0.17 --hybrid-override-pattern)",
            {"spec": ["dfa_megatron.megatron", "hybrid_stack_spec"]},
        ),
        Refusal(
            lambda a: a.hybrid_pattern and a.dfa_data_layout == "zigzag",
            "a hybrid model in layout 'zigzag' in a self-check",
            "its mixers are Megatron's own there, whose exchanges this package does not make",
            "--dfa-data-layout boundary or contiguous",
            {"hybrid_pattern": "M*", "dfa_data_layout": "zigzag"},
        ),
        stated(
            "other_layers",
            "layers {other_layers} of a hybrid's pattern in a self-check",
            "they have no modules for a CPU",
            "a pattern of M, *, -, E and G",
            "+",
        ),
        Refusal(
            lambda a: (a.context_parallel_size or 1) > MOST_SEQUENCE_RANKS,
            "--context-parallel-size {context_parallel_size} in a self-check",
            f"it runs at most {MOST_SEQUENCE_RANKS} processes, and this size is never reduced",
            f"the same flags with --context-parallel-size {MOST_SEQUENCE_RANKS}",
            {"context_parallel_size": MOST_SEQUENCE_RANKS + 1},
        ),
        Refusal(
            lambda a: a.optimizer not in (None, "adam", "sgd"),
            "--optimizer {optimizer} in a self-check",
            "it was not tried",
            "adam or sgd",
            {"optimizer": "muon"},
        ),
        Refusal(
            lambda a: a.sft or a.dataloader_inter_document_masking,
            "packed documents in a self-check",
            "Megatron's attention for CPUs takes none, so there is nothing to compare with",
            "flags without packing, and `dfa-megatron selfcheck attention --cu-seqlens` for the functions",
            {"sft": True},
        ),
    ),
    BOUNDARY,
)
