"""Specs, layers and attentions that are refused when a model is built."""

from __future__ import annotations

from dfa_megatron.megatron.refusals.model_config import BOUNDARY, several_ranks
from dfa_megatron.refusals import Refusal, Stage, stated

_OTHER_SPEC = "distribute_attention in a model provider of your own, or Megatron-Core 0.19 and get_spec"

COMM_TYPES = (None, "dfa", "p2p")
"""The values of Megatron's --cp-comm-type that mean this attention; p2p is Megatron's default."""

SPEC = Stage(
    "Megatron: when a spec is made",
    (
        stated(
            "no_core_attention",
            "a spec of type {no_core_attention}",
            "it has no submodules.self_attention.submodules.core_attention to replace",
            "the spec of one TransformerLayer, or TransformerBlockSubmodules of such",
            "object",
        ),
        stated(
            "replaced",
            "a spec whose core_attention is {replaced}",
            "everything that it does beside softmax attention (caps, scales, windows, masks) would be dropped",
            "a spec with Megatron's DotProductAttention or TEDotProductAttention, without parameters of its own",
            "CappedAttention",
        ),
        stated(
            "layer_class",
            "the layer class {layer_class}",
            "it is not a megatron.core TransformerLayer",
            "a spec of TransformerLayer",
            "dict",
        ),
        stated(
            "stack_error",
            "Megatron's hybrid stack spec",
            "it cannot be imported: {stack_error}",
            "an installation with Transformer Engine, or distribute_attention of a stack spec of your own",
            "No module named 'mamba_ssm'",
        ),
        stated(
            "no_mixer",
            "a hybrid stack whose {no_mixer} has no mixer",
            "tokens are in order, and the layer may assume zigzag order",
            "Megatron's MambaLayer and TransformerLayer, or data_layout='zigzag'",
            "mamba_layer",
        ),
        stated(
            "no_script",
            "SPEC outside a Megatron script",
            "it is made from Megatron's global arguments",
            "distribute_attention(spec, transformer_config, config=...)",
        ),
        Refusal(
            lambda a: a.spec_flags and a.num_experts,
            "SPEC with --num-experts",
            "the model's spec needs its config, which scripts up to Megatron-Core 0.18 do not pass on",
            _OTHER_SPEC,
            {"spec_flags": True, "num_experts": 8},
        ),
        Refusal(
            lambda a: a.spec_flags and a.sequence_parallel and a.torch_norm,
            "SPEC with --sequence-parallel, without Transformer Engine and Apex",
            "the model's spec needs its config, which scripts up to Megatron-Core 0.18 do not pass on",
            _OTHER_SPEC,
            {"spec_flags": True, "sequence_parallel": True, "torch_norm": True},
        ),
        stated(
            "not_in_spec",
            "SPEC with {not_in_spec}",
            "the spec that is made here does not have it",
            f"leaving it out, {_OTHER_SPEC}",
            "--use-kitchen",
        ),
    ),
)

LAYERS = Stage(
    "Megatron: when a layer is built",
    (
        Refusal(
            lambda a: a.attn_mask_type not in (None, "causal"),
            "attn_mask_type={attn_mask_type!r}",
            "only causal attention is computed",
            "a layer spec whose self_attention has params={{'attn_mask_type': AttnMaskType.causal}}",
            {"attn_mask_type": "padding"},
        ),
        Refusal(
            lambda a: a.attention_type not in (None, "self"),
            "attention_type={attention_type!r}",
            "queries and keys must come from one sequence",
            "self-attention",
            {"attention_type": "cross"},
        ),
        stated(
            "attention_dropout",
            "attention_dropout={attention_dropout}",
            "the block kernels have no dropout inside the softmax",
            "0.0",
            0.1,
        ),
        Refusal(
            lambda a: a.cp_comm_type not in COMM_TYPES,
            "cp_comm_type={cp_comm_type!r}",
            "that is another distributed attention",
            "--cp-comm-type dfa, or leaving it out",
            {"cp_comm_type": "a2a"},
        ),
        stated(
            "unknown_argument",
            "the argument {unknown_argument} of core attention",
            "this package does not know its meaning",
            "leaving it unset",
            "num_splits=4",
        ),
        Refusal(
            lambda a: a.group_size is not None and a.group_size != a.context_parallel_size,
            "context_parallel_size={context_parallel_size} in the config of a layer whose context-parallel group has "
            "{group_size} ranks",
            "the layers would mistake the order of the tokens",
            "the same number in both",
            {"context_parallel_size": 1, "group_size": 2},
        ),
        Refusal(
            lambda a: a.dfa_remat_offload and a.dfa_remat == "auto" and a.nothing_recomputed,
            "remat_offload without --recompute-granularity full",
            "without rematerialization there is nothing to offload",
            "that flag, or remat='on'",
            {"dfa_remat_offload": True, "nothing_recomputed": True},
        ),
        Refusal(
            lambda a: a.config_of_one_layer and a.recompute_granularity == "full" and a.dfa_remat != "off",
            "full recomputation of layers that each have a config of their own",
            "the flags must be taken over on the model's config",
            "distribute_attention(spec, transformer_config), or remat='off'",
            {"config_of_one_layer": True, "recompute_granularity": "full"},
        ),
        Refusal(
            lambda a: (
                a.hybrid_stack
                and a.recompute_granularity == "full"
                and a.recompute_method == "block"
                and a.dfa_remat != "off"
            ),
            "recompute_method='block' in a hybrid model",
            "not every layer of its stack knows its place in the pipeline stage",
            "--recompute-method uniform --recompute-num-layers 1",
            {"hybrid_stack": True, "recompute_granularity": "full", "recompute_method": "block"},
        ),
        Refusal(
            lambda a: a.single_layer and several_ranks(a) and a.dfa_data_layout != "zigzag" and a.is_hybrid_model,
            "an attention layer by itself in a hybrid model",
            "the layers beside it rely on Megatron's zigzag order",
            "distribute_attention of the whole hybrid stack spec, or --dfa-data-layout zigzag",
            {"single_layer": True, "context_parallel_size": 2, "is_hybrid_model": True},
        ),
        stated(
            "other_mixer",
            "the mixer {other_mixer} where tokens are in order",
            "it is neither Megatron's MambaMixer nor its GatedDeltaNet, and may assume zigzag order",
            "a mixer of these classes, or --dfa-data-layout zigzag",
            "DSAttention",
        ),
        stated(
            "deterministic_delta",
            "gated delta net with deterministic_mode",
            "Megatron then computes its convolution with PyTorch's function, where no tokens of another rank can enter",
            "no --deterministic-mode",
        ),
        stated(
            "own_rotary",
            "latent attention of class {own_rotary}",
            "its rotary table is not made by a module whose order of tokens can be chosen",
            "a subclass of Megatron's MultiLatentAttention that makes its table as it does",
            "NewLatentAttention",
        ),
        Refusal(
            lambda a: (
                a.torch_norm and (a.normalization not in ("LayerNorm", "RMSNorm") or a.layernorm_zero_centered_gamma)
            ),
            "normalization={normalization!r} with sequence parallelism",
            "without Transformer Engine or Apex only plain LayerNorm and RMSNorm are done",
            "LayerNorm, RMSNorm, or an installation with Transformer Engine",
            {"torch_norm": True, "normalization": "L2Norm"},
        ),
        stated(
            "other_output",
            "loss_tile with an output layer of class {other_output}",
            "only the product of Megatron's ColumnParallelLinear is known to be made by tiles",
            "--dfa-loss-tile off",
            "TELMHeadColumnParallelLinear",
        ),
        stated(
            "other_core",
            "a distributed layer whose core_attention became {other_core}",
            "something replaced it behind distribute_attention, and would mistake the order of the tokens",
            "leaving the spec as it is (Megatron-Bridge: attention_backend other than 'local')",
            "DotProductAttention",
        ),
        stated(
            "other_mlp",
            "mlp_tile with an MLP of class {other_mlp}",
            "only a dense MLP computes each token by itself; experts are chosen and balanced over all tokens",
            "--dfa-mlp-tile off",
            "MoELayer",
        ),
        Refusal(
            lambda a: a.other_layer and several_ranks(a) and (a.dfa_data_layout != "zigzag" or a.in_pack),
            "a layer with Megatron's own attention in a distributed model, in layout {dfa_data_layout!r}",
            "it assumes Megatron's zigzag order of the tokens, of every document in a pack",
            "distribute_attention for the spec of every layer, those of multi-token prediction too",
            {"other_layer": True, "context_parallel_size": 2},
        ),
    ),
    BOUNDARY,
)
