"""What Megatron-Core can be asked for and would go wrong silently with this attention: refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination of Megatron's TransformerConfig, or its flags, and our options that is refused."""

    applies: Callable[[Any, DistAttentionConfig], bool]
    what: str
    """May name the config's fields: '{field}'."""
    why: str
    instead: str


def _get(config: Any, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


def _on(name: str) -> Callable[[Any, DistAttentionConfig], bool]:
    return lambda config, options: bool(_get(config, name))


def _recompute_modules(config: Any) -> list[str]:
    return list(_get(config, "recompute_modules") or ())


def _permuted(config: Any, options: DistAttentionConfig) -> bool:
    """Inside the layers tokens are not where Megatron believes them to be."""
    return bool(_get(config, "context_parallel_size", 1) > 1) and options.data_layout != "zigzag"


def _heads_per_rank(config: Any) -> int:
    return int(_get(config, "num_attention_heads", 0) // _get(config, "tensor_model_parallel_size", 1))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda c, o: bool(_get(c, "attention_dropout", 0.0)),
        "attention_dropout={attention_dropout}",
        "the block kernels drop nothing inside the softmax",
        "--attention-dropout 0.0 (dropout elsewhere, --hidden-dropout, works)",
    ),
    Refusal(
        lambda c, o: isinstance(_get(c, "window_size"), int),
        "window_size={window_size}",
        "it is a pair, of tokens to the left and to the right",
        "--window-size with two numbers",
    ),
    Refusal(
        _on("attn_logit_softcapping"),
        "attn_logit_softcapping={attn_logit_softcapping}",
        "Megatron-Core's attention caps no scores, and neither does this in its place",
        "a model without capped scores, or dist_flash_attn_func(softcap=...) in layers of your own",
    ),
    Refusal(
        lambda c, o: isinstance(_get(c, "window_size"), Sequence) and _get(c, "window_size")[1] > 0,
        "window_size={window_size}",
        "it reaches past the token, and attention is causal (Megatron's own attentions differ on what that means)",
        "--window-size with 0 at its right",
    ),
    Refusal(_on("qk_clip"), "qk_clip", "it needs the largest logit of every head", "no --qk-clip"),
    Refusal(
        _on("log_max_attention_logit"),
        "log_max_attention_logit",
        "it needs the largest logit of every head",
        "no --log-max-attention-logit",
    ),
    Refusal(
        lambda c, o: bool(_get(c, "fp8_dot_product_attention") or _get(c, "fp8_multi_head_attention")),
        "attention in fp8",
        "the block kernels compute in the input's 16- or 32-bit dtype",
        "fp8 for the linear layers only",
    ),
    Refusal(
        lambda c, o: _get(c, "recompute_granularity") == "selective" and "core_attn" in _recompute_modules(c),
        "selective recomputation of core_attn",
        "it would run the distributed attention, messages included, a second time",
        "--recompute-granularity full (attention is then kept and the rest recomputed), or selective without core_attn",
    ),
    Refusal(
        lambda c, o: _get(c, "recompute_granularity") == "selective" and o.remat == "on",
        "remat='on' together with selective recomputation",
        "a layer would be recomputed inside its own recomputation",
        "--recompute-granularity full, or remat='auto'",
    ),
    Refusal(
        lambda c, o: bool(
            _get(c, "cuda_graph_impl", "none") not in ("none", None)
            or _get(c, "enable_cuda_graph")
            or _get(c, "external_cuda_graph")
        ),
        "CUDA graphs",
        "messages between ranks inside a captured layer are not tested",
        "--cuda-graph-impl none",
    ),
    Refusal(
        _on("overlap_moe_expert_parallel_comm"),
        "overlap_moe_expert_parallel_comm",
        "it calls the parts of a layer directly, past rematerialization and past the exchange of hidden states",
        "no --overlap-moe-expert-parallel-comm",
    ),
    Refusal(
        lambda c, o: _get(c, "experimental_attention_variant") == "dsa",
        "experimental_attention_variant='dsa'",
        "an indexer chooses the keys of every token, and this attention would take them all",
        "the model with Megatron's own attention: without this package's spec, with --cp-comm-type allgather "
        "(Megatron-Core 0.19 and later)",
    ),
    Refusal(
        lambda c, o: (
            _get(c, "experimental_attention_variant") == "gated_delta_net"
            or _get(c, "linear_attention_freq") is not None
        ),
        "gated delta net among the layers of a GPT model",
        "these layers have no core attention to replace, and rely on Megatron's zigzag order",
        "a hybrid model, which has them beside attention layers (--spec dfa_megatron.megatron hybrid_stack_spec, "
        "Megatron-Core 0.19 and later), or the model with Megatron's own attention",
    ),
    Refusal(
        lambda c, o: _get(c, "experimental_attention_variant") not in (None, "dsa", "gated_delta_net"),
        "experimental_attention_variant={experimental_attention_variant!r}",
        "this attention is softmax over all keys before a token, which that variant need not be",
        "the model with Megatron's own attention: without this package's spec",
    ),
    Refusal(
        _on("hybrid_context_parallel"),
        "hybrid_context_parallel",
        "every sequence must be spread over the whole context-parallel group",
        "no --hybrid-context-parallel",
    ),
    Refusal(
        lambda c, o: bool(_get(c, "hierarchical_context_parallel_sizes")),
        "hierarchical_context_parallel_sizes",
        "the schedule runs over one flat context-parallel group",
        "no --hierarchical-context-parallel-sizes",
    ),
    Refusal(
        _on("use_kitchen_attention"), "use_kitchen_attention", "this class computes attention itself", "leave it off"
    ),
    Refusal(_on("batch_invariant_mode"), "batch_invariant_mode", "the block kernels do not promise it", "leave it off"),
    Refusal(_on("flash_decode"), "flash_decode", "it is for inference", "training and evaluation without a key cache"),
    Refusal(
        lambda c, o: _get(c, "transformer_impl") == "inference_optimized",
        "transformer_impl='inference_optimized'",
        "it is for inference",
        "--transformer-impl local or transformer_engine",
    ),
    Refusal(
        lambda c, o: (
            bool(_get(c, "fine_grained_activation_offloading")) and "core_attn" in (_get(c, "offload_modules") or ())
        ),
        "offloading core_attn",
        "attention keeps its tensors for the backward pass itself",
        "--offload-modules without core_attn",
    ),
    Refusal(
        lambda c, o: bool(_get(c, "cpu_offloading")) and o.remat == "on",
        "cpu_offloading together with remat='on'",
        "Megatron does not combine offloading with recomputation",
        "one of the two",
    ),
    Refusal(
        lambda c, o: o.remat_offload and o.remat == "off",
        "remat_offload together with remat='off'",
        "nothing is kept that could travel",
        "remat='auto' or 'on'",
    ),
    Refusal(
        lambda c, o: _get(c, "num_microbatches_with_partial_activation_checkpoints") is not None and o.remat != "off",
        "num_microbatches_with_partial_activation_checkpoints",
        "rematerialization recomputes the same layers in every micro-batch",
        "leave it off, or remat='off'",
    ),
    Refusal(
        _on("heterogeneous_block_specs"),
        "heterogeneous_block_specs",
        "each layer has a config of its own, so recomputation cannot be taken over in one place",
        "layers that share one config",
    ),
    Refusal(
        lambda c, o: _permuted(c, o) and _get(c, "mrope_section") is not None,
        "multimodal rotary embeddings in this layout",
        "their table changes with every micro-batch",
        "--dfa-data-layout zigzag",
    ),
    Refusal(
        lambda c, o: o.data_layout == "contiguous" and _permuted(c, o) and bool(_get(c, "is_hybrid_model")),
        "a hybrid model in the contiguous layout",
        "its other layers rely on Megatron's zigzag order",
        "--dfa-data-layout boundary or zigzag",
    ),
    Refusal(
        lambda c, o: o.data_layout == "contiguous" and _permuted(c, o) and bool(_get(c, "mtp_num_layers")),
        "multi-token prediction in the contiguous layout",
        "Megatron shifts its labels assuming zigzag order",
        "--dfa-data-layout boundary or zigzag",
    ),
    Refusal(
        lambda c, o: o.schedule != "auto" and o.data_layout == "zigzag",
        "a schedule by name with zigzag data",
        "zigzag tokens share out the work, and every rank computes its own rows",
        "--dfa-schedule auto, or --dfa-data-layout contiguous or boundary",
    ),
    Refusal(
        lambda c, o: o.fixed_degree > 1 and _get(c, "context_parallel_size", 1) % o.fixed_degree != 0,
        "a ulysses_degree with context_parallel_size={context_parallel_size}",
        "it must divide the context-parallel ranks",
        "a --dfa-ulysses-degree that does",
    ),
    Refusal(
        lambda c, o: o.fixed_degree > 1 and _heads_per_rank(c) % o.fixed_degree != 0,
        "a ulysses_degree with num_attention_heads={num_attention_heads}",
        "it must divide the query heads of a tensor-parallel rank",
        "a --dfa-ulysses-degree that does, or another tensor-parallel size",
    ),
)


PACK_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        _on("multi_latent_attention"),
        "packed documents with multi-latent attention",
        "it makes its own rotary table inside the layer, in zigzag order of every document",
        "one document per row",
    ),
    Refusal(
        lambda c, o: _get(c, "mrope_section") is not None,
        "packed documents with multimodal rotary embeddings",
        "their table follows position_ids, not documents",
        "one document per row",
    ),
    Refusal(
        lambda c, o: _get(c, "context_parallel_size", 1) > 1 and bool(_get(c, "mtp_num_layers")),
        "packed documents with multi-token prediction",
        "Megatron shifts its labels assuming zigzag order of every document",
        "one document per row, or no prediction layers",
    ),
    Refusal(
        lambda c, o: _get(c, "context_parallel_size", 1) > 1 and bool(_get(c, "is_hybrid_model")),
        "packed documents in a hybrid model",
        "its other layers rely on Megatron's zigzag order of every document",
        "one document per row",
    ),
)
"""What does not go with packed_seq_params; seen at the first batch that brings them."""


def check_packable(config: Any, options: DistAttentionConfig) -> None:
    """Refuse packed documents where something beside attention would mistake them.

    Raises:
        UnsupportedError: naming it and what works.
    """
    for refusal in PACK_REFUSALS:
        if refusal.applies(config, options):
            raise UnsupportedError(refusal.what, refusal.why, refusal.instead)


def check_config(config: Any, options: DistAttentionConfig) -> None:
    """Refuse what would otherwise be silently wrong.

    Args:
        config: Megatron's TransformerConfig; a field that its version does not have counts as unset.

    Raises:
        UnsupportedError: naming the field, why it is refused and what works.
    """
    for refusal in REFUSALS:
        if refusal.applies(config, options):
            raise UnsupportedError(refusal.what.format(**_Fields(config)), refusal.why, refusal.instead)


class _Fields(dict[str, Any]):
    def __init__(self, config: Any) -> None:
        super().__init__(vars(config))


def markdown_table(refusals: Sequence[Refusal] = REFUSALS) -> str:
    """Refusals as the table that the documentation prints."""
    rows = ["| refused | because | what works |", "|---|---|---|"]
    for refusal in refusals:
        what = re.sub(r"=\{.*?\}", "", refusal.what)
        rows.append(f"| {what} | {refusal.why} | {refusal.instead} |")
    return "\n".join(rows)
