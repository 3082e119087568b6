"""Kinds of models, what one rank with Megatron-Core's own attention is asked for them, and what a step must count."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from tests.megatron import harness
from tests.megatron.harness import Case, Topology

T = TypeVar("T")

FULL = ("uniform", 1)
"""--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"""

TWO = (("num_layers", 2),)
PER_TOKEN = (("calculate_per_token_loss", True),)
LOCAL = (("transformer_impl", "local"),)
"""FSDP2 otherwise believes that linear layers are to be sharded by themselves, inside layers that are."""

_SPARSE = (("num_moe_experts", 4), ("moe_layer_freq", [0, 1, 0, 1]), ("moe_ffn_hidden_size", 64))
ALLTOALL = (*_SPARSE, ("moe_token_dispatcher_type", "alltoall"))
ALLGATHER = (*_SPARSE, ("moe_token_dispatcher_type", "allgather"))
UNBALANCED = (*ALLGATHER, ("moe_layer_freq", [0, 1]), ("moe_router_load_balancing_type", "none"))
ROUTED = (*ALLGATHER, *TWO, ("moe_layer_freq", [0, 1]))
BALANCED = (
    *ROUTED, ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss", "global_aux_loss"]),
    ("moe_aux_loss_coeff", [0.5, 0.3, 0.2]), ("moe_z_loss_coeff", 0.1),
)  # fmt: skip
BIASED = (
    *ROUTED, ("moe_router_score_function", "sigmoid"), ("moe_router_enable_expert_bias", True),
    ("moe_router_bias_update_rate", 0.1),
)  # fmt: skip

_LATENT = (
    *TWO, ("q_lora_rank", 24), ("kv_lora_rank", 16), ("qk_head_dim", 16), ("qk_pos_emb_head_dim", 8),
    ("v_head_dim", 12), ("qk_layernorm", True), ("num_query_groups", None),
)  # fmt: skip
LATENT = (*_LATENT, ("rope_type", "rope"))
YARN = (
    *_LATENT, ("rope_type", "yarn"), ("rotary_scaling_factor", 4.0), ("original_max_position_embeddings", 12),
    ("mscale", 0.7), ("mscale_all_dim", 0.3),
)  # fmt: skip

WINDOWS = (("window_size", (7, 0)),)
THREE_OF_FOUR = (("window_size", (21, 0)), ("window_attn_skip_freq", 4))
BY_LIST = (("window_size", (5, 0)), ("window_attn_skip_freq", [1, 0, 0, 1]))
LEARNABLE = (*TWO, ("softmax_type", "learnable"))
OFF_BY_ONE = (*TWO, ("softmax_type", "off-by-one"), ("window_size", (9, 0)), ("window_attn_skip_freq", 2))
TWO_AHEAD = (*TWO, ("mtp_num_layers", 2))


def _block(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    plain = {"no_op": False, "replace_with_linear": False}
    return {
        "attention": {**plain, "n_heads_in_group": None, **attention},
        "ffn": {**plain, "ffn_mult": None, "intermediate_size": None, **ffn},
    }


_BLOCKS = [
    _block({"no_op": True}, {"intermediate_size": 96}),
    _block({"n_heads_in_group": 2}, {"intermediate_size": 128}),
    _block({"replace_with_linear": True}, {"no_op": True}),
    _block({"n_heads_in_group": 4}, {"replace_with_linear": True}),
]
HETEROGENEOUS = (
    ("heterogeneous_layers_config_encoded_json", json.dumps({"block_configs": _BLOCKS})),
    ("heterogeneous_block_specs", True),
)
"""Layers with a config of their own, some without attention or MLP."""

PADDED: dict[str, Any] = {
    "padded": (*TWO, *PER_TOKEN, ("window_size", (9, 0)), ("window_attn_skip_freq", 2)),
    "padded latent": (*PER_TOKEN, *LATENT),
    "padded experts": (*TWO, *PER_TOKEN, *UNBALANCED, ("moe_aux_loss_coeff", 0)),
}


def _alone(steps: int = 3, **how: Any) -> Case:
    return Case(options=None, steps=steps, **how)


REFERENCES: dict[str, Case] = {
    "plain": _alone(harness.STEPS),
    "one group": _alone(2, config=(("num_query_groups", 1),)),
    "norms": _alone(2, config=(("qk_layernorm", True),)),
    "experts": _alone(config=ALLGATHER),
    "balanced": _alone(2, config=BALANCED, masked=True),
    "balanced per token": _alone(2, config=(*BALANCED, *PER_TOKEN), masked=True),
    "biased": _alone(config=BIASED),
    "latent": _alone(config=LATENT),
    "yarn": _alone(config=YARN),
    "packed yarn": _alone(1, config=YARN, pairs="documents"),
    "packed": _alone(pairs="documents"),
    "windows": _alone(2, config=WINDOWS),
    "mixed": _alone(2, config=THREE_OF_FOUR),
    "packed windows": _alone(2, config=WINDOWS, pairs="documents"),
    "packed mixed": _alone(config=BY_LIST, pairs="documents"),
    "learnable": _alone(1, config=LEARNABLE, optimizer="megatron"),
    "packed learnable": _alone(1, config=LEARNABLE, pairs="documents"),
    "off by one": _alone(1, config=OFF_BY_ONE),
    "heterogeneous": _alone(1, config=HETEROGENEOUS),
    "ahead": _alone(1, config=TWO_AHEAD),
    "ahead per token": _alone(1, config=(*TWO_AHEAD, *PER_TOKEN)),
    "tree": _alone(1, config=BY_LIST, pairs="tree"),
    "tree yarn": _alone(1, config=YARN, pairs="tree"),
    "tree experts": _alone(1, config=(*ROUTED, *LEARNABLE), pairs="tree"),
    "mask": _alone(1, pairs="mask"),
    "mask balanced": _alone(1, config=(*BALANCED, *PER_TOKEN), pairs="mask"),
    **{name: _alone(1, config=config, pairs="documents") for name, config in PADDED.items()},
}
"""What the fixture `references` makes: Megatron's own attention, one document at a time, on one rank."""


def by_turns(cases: Sequence[T]) -> Sequence[T]:
    """Every second one with DFA_HALF=0 or 1, at least one, or all without."""
    half = os.environ.get("DFA_HALF")
    return (cases[int(half) :: 2] if half else cases) or cases


def expected(topology: Topology, wanted: Case) -> dict[str, int]:
    """What the first step of a case must count on every rank: each attention runs once per layer and micro-batch."""
    assert wanted.options is not None
    config = dict(wanted.config)
    if "mtp_num_layers" in config and topology.pp > 1:
        return {}  # prediction layers are on the last stage
    layers = config.get("num_layers", harness.LAYERS) // topology.pp + config.get("mtp_num_layers", 0)
    layers = 1 if wanted.config == HETEROGENEOUS else layers
    micro_batches = harness.MICRO_BATCHES // topology.dp
    attentions = layers * micro_batches
    full = wanted.recompute is not None
    exchanged = {"ulysses_exchanges": 4 * attentions} if wanted.options.ulysses_degree == 2 else {}
    if wanted.options.checkpoint == "none" or (wanted.options.checkpoint == "auto" and not full):
        return {"attention_forwards": attentions * (2 if full else 1), "replays": 0, "remat_bytes": 0, **exchanged}
    replays = attentions
    if wanted.options.checkpoint == "auto" and wanted.recompute is not None and wanted.recompute[0] == "block":
        chunks = topology.vp or 1
        replays = min(wanted.recompute[1], layers // chunks) * chunks * micro_batches
    counts = {"attention_forwards": attentions, "replays": replays, **exchanged}
    if wanted.padded or wanted.config == HETEROGENEOUS:  # other numbers of tokens or heads
        return counts
    rows = harness.SEQUENCE // topology.cp * harness.BATCH * harness.HEADS // topology.tp
    width = config.get("v_head_dim", harness.HIDDEN // harness.HEADS)
    return {**counts, "remat_bytes": replays * rows * (width + 1) * 4}  # out and lse, float32
