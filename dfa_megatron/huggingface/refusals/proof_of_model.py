"""What `prove` refuses."""

from __future__ import annotations

from dfa_megatron.refusals import Stage, stated

PROOF = Stage(
    "transformers: when a model is proved",
    (
        stated(
            "no_attention",
            "prove of a {kind}",
            "its attention is not distributed, so there is nothing to compare",
            "distribute_attention before it",
            kind="LlamaForCausalLM",
        ),
        stated(
            "parts",
            "prove of a {kind}, a model of several parts",
            "its texts have no images or sound",
            "prove of a model that has its language model alone",
            kind="Gemma3ForConditionalGeneration",
        ),
        stated(
            "no_head",
            "prove of a {kind}",
            "it has no head, and so no loss to start a backward from",
            "prove of the model with its head, such as LlamaForCausalLM",
            kind="LlamaModel",
        ),
    ),
)
