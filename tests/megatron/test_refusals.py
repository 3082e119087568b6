"""Whatever this integration would not honour is refused by name, at set-up wherever it can be known there."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention, check_call
from dfa_megatron.megatron.refusals import PACK_REFUSALS, REFUSALS, check_config, markdown_table
from dfa_megatron.megatron.start.flags import FLAG_REFUSALS, add_dfa_arguments, check_args, options_of
from dfa_megatron.megatron.start.script import LAUNCH_REFUSALS
from tests.megatron.harness import Case, Topology, case, make_config

OPTIONS = DistAttentionConfig(data_layout="boundary")

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # text of the message, fields of the TransformerConfig, our options
    ("window_size=.128, 4.", {"window_size": (128, 4)}, {}),
    ("window_size=128 is not supported: it is a pair", {"window_size": 128}, {}),
    ("attn_logit_softcapping=50.0", {"attn_logit_softcapping": 50.0}, {}),
    ("attention_dropout=0.1", {"attention_dropout": 0.1}, {}),
    ("qk_clip", {"qk_clip": True}, {}),
    ("log_max_attention_logit", {"log_max_attention_logit": True}, {}),
    ("attention in fp8", {"fp8_dot_product_attention": True}, {}),
    ("attention in fp8", {"fp8_multi_head_attention": True}, {}),
    (
        "selective recomputation of core_attn",
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {},
    ),
    ("remat='on'", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, {"remat": "on"}),
    ("CUDA graphs", {"cuda_graph_impl": "local"}, {}),
    ("CUDA graphs", {"enable_cuda_graph": True}, {}),
    ("overlap_moe_expert_parallel_comm", {"overlap_moe_expert_parallel_comm": True}, {}),
    ("'dsa' is not.*an indexer chooses the keys.*allgather", {"experimental_attention_variant": "dsa"}, {}),
    ("gated delta net.*hybrid_stack_spec", {"experimental_attention_variant": "gated_delta_net"}, {}),
    ("gated delta net.*hybrid_stack_spec", {"linear_attention_freq": 4}, {}),
    ("experimental_attention_variant='newer'.*Megatron's own", {"experimental_attention_variant": "newer"}, {}),
    ("hybrid_context_parallel", {"hybrid_context_parallel": True}, {}),
    ("hierarchical_context_parallel_sizes", {"hierarchical_context_parallel_sizes": [2, 2]}, {}),
    ("use_kitchen_attention", {"use_kitchen_attention": True}, {}),
    ("batch_invariant_mode", {"batch_invariant_mode": True}, {}),
    ("flash_decode", {"flash_decode": True}, {}),
    ("inference_optimized", {"transformer_impl": "inference_optimized"}, {}),
    ("offloading core_attn", {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, {}),
    ("cpu_offloading", {"cpu_offloading": True}, {"remat": "on"}),
    ("remat_offload", {}, {"remat_offload": True, "remat": "off"}),
    ("partial_activation_checkpoints", {"num_microbatches_with_partial_activation_checkpoints": 1}, {}),
    ("heterogeneous_block_specs", {"heterogeneous_block_specs": True}, {}),
    ("multimodal rotary", {"mrope_section": [4, 2, 2]}, {}),
    ("hybrid model", {"is_hybrid_model": True}, {"data_layout": "contiguous"}),
    ("multi-token prediction", {"mtp_num_layers": 1}, {"data_layout": "contiguous"}),
    ("a schedule by name with zigzag data", {}, {"schedule": "ring", "data_layout": "zigzag"}),
    ("context_parallel_size=2", {}, {"ulysses_degree": 4}),
    (
        "num_attention_heads=10",
        {"num_attention_heads": 10, "tensor_model_parallel_size": 2},
        {"ulysses_degree": 2},
    ),
]


@pytest.mark.parametrize(("message", "fields", "options"), REFUSED)
def test_a_config_that_would_be_silently_wrong_is_refused(
    message: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    config = SimpleNamespace(context_parallel_size=2, **fields)
    with pytest.raises(UnsupportedError, match=message):
        check_config(config, OPTIONS.replace(**options))


def test_every_refusal_of_the_table_is_tested() -> None:
    met = set()
    for _, fields, options in REFUSED:
        config = SimpleNamespace(context_parallel_size=2, **fields)
        met |= {place for place, refusal in enumerate(REFUSALS) if refusal.applies(config, OPTIONS.replace(**options))}
    assert met == set(range(len(REFUSALS)))


def test_the_layouts_that_keep_megatrons_order_refuse_less() -> None:
    for fields in ({"multi_latent_attention": True}, {"is_hybrid_model": True}, {"mtp_num_layers": 1}):
        check_config(SimpleNamespace(context_parallel_size=2, **fields), DistAttentionConfig(data_layout="zigzag"))
    check_config(SimpleNamespace(context_parallel_size=2, mtp_num_layers=1), OPTIONS)
    check_config(SimpleNamespace(context_parallel_size=1, mtp_num_layers=1), DistAttentionConfig())


def test_megatrons_real_config_is_read() -> None:
    check_config(make_config(Topology(), case()), OPTIONS)
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0\.2.*--attention-dropout 0\.0"):
        check_config(make_config(Topology(), Case(None), attention_dropout=0.2), OPTIONS)


def build(**changes: Any) -> DistributedCoreAttention:
    from megatron.core.transformer.enums import AttnMaskType

    arguments: dict[str, Any] = {
        "config": make_config(Topology(), case()),
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": SimpleNamespace(cp=None),
        "options": OPTIONS,
    }
    return DistributedCoreAttention(**{**arguments, **changes})


def test_core_attention_refuses_what_it_is_not_built_for() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    build(cp_comm_type="dfa", softmax_scale=0.5, k_channels=24, v_channels=16)
    for changes, message in (
        ({"attn_mask_type": AttnMaskType.padding}, "attn_mask_type='padding'"),
        ({"attention_type": "cross"}, "attention_type='cross'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"cp_comm_type": "a2a"}, "cp_comm_type='a2a'"),
        ({"num_splits": 4}, "num_splits=4"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            build(**changes)


def test_calls_with_masks_biases_or_caches_are_refused() -> None:
    check_call(None, None, None)
    for place, message in enumerate(("attention_mask", "attention_bias", "inference context")):
        arguments = [None] * 3
        arguments[place] = object()
        with pytest.raises(UnsupportedError, match=message):
            check_call(*arguments)


def test_core_attention_of_plain_softmax_has_no_parameters_and_the_head_dimension_sets_the_scale() -> None:
    attention = build()
    assert not list(attention.parameters())
    assert not attention.state_dict()
    assert attention.softmax_scale == attention.config.kv_channels**-0.5
    assert build(k_channels=36).softmax_scale == 36**-0.5
    assert build(softmax_scale=0.5, k_channels=36).softmax_scale == 0.5
    assert build(config=make_config(Topology(), case(), deterministic_mode=True)).deterministic


def parse(*flags: str) -> argparse.Namespace:
    return add_dfa_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_the_help_of_a_flag_names_the_default_that_it_has_there() -> None:
    shown = " ".join(add_dfa_arguments(argparse.ArgumentParser()).format_help().split())
    assert "attention works on them as they are. Default: boundary." in shown
    shown = " ".join(DistAttentionConfig.add_arguments(argparse.ArgumentParser()).format_help().split())
    assert "attention works on them as they are. Default: contiguous." in shown


def test_flags_become_options_and_scripts_default_to_their_own_data_order() -> None:
    assert options_of(parse()).data_layout == "boundary"
    assert options_of(argparse.Namespace()).data_layout == "boundary"
    assert options_of() == DistAttentionConfig(data_layout="boundary")
    options = options_of(parse("--dfa-data-layout", "contiguous", "--dfa-schedule", "ring", "--dfa-deterministic"))
    assert options == DistAttentionConfig(data_layout="contiguous", schedule="ring", deterministic=True)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("mask made in the data loader", {"create_attention_mask_in_dataloader": True, "context_parallel_size": 2}),
        ("--reset-attention-mask", {"reset_attention_mask": True}),
        ("--sft in this layout", {"sft": True, "context_parallel_size": 2}),
        (
            "--logits-load-dir.*boundary or zigzag",
            {"logits_load_dir": "logits", "context_parallel_size": 2, "dfa_data_layout": "contiguous"},
        ),
        (
            "--logits-save-dir.*boundary or zigzag",
            {"logits_save_dir": "logits", "context_parallel_size": 2, "dfa_data_layout": "contiguous"},
        ),
        (
            "--moe-routing-trace-path in the boundary layout",
            {"moe_routing_trace_path": "trace", "context_parallel_size": 2},
        ),
        ("--attention-backend local", {"attention_backend": SimpleNamespace(name="local")}),
        ("--use-torch-fsdp2 with", {"use_torch_fsdp2": True, "calculate_per_token_loss": True}),
    ],
)
def test_flags_that_the_model_never_sees_are_refused(message: str, fields: dict[str, Any]) -> None:
    check_args(argparse.Namespace(), OPTIONS)
    with pytest.raises(UnsupportedError, match=message):
        options_of(argparse.Namespace(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"logits_load_dir": "logits", "logits_save_dir": "logits"},
        {"logits_load_dir": "logits", "dfa_data_layout": "zigzag"},
        {"moe_routing_trace_path": "trace", "dfa_data_layout": "contiguous"},
        {"moe_routing_trace_path": "trace", "hybrid_layer_pattern": "M*E"},
    ],
)
def test_files_that_go_by_the_place_of_tokens_are_taken_where_it_is_that_of_the_batch(fields: dict[str, Any]) -> None:
    options_of(argparse.Namespace(context_parallel_size=2, **fields))


def test_packed_data_of_scripts_are_taken_where_they_are_sliced_by_rows() -> None:
    for fields in (
        {"sft": True, "context_parallel_size": 1},
        {"sft": True, "context_parallel_size": 2, "dfa_data_layout": "contiguous"},
        {"dataloader_inter_document_masking": True, "context_parallel_size": 2},
    ):
        options_of(argparse.Namespace(**fields))


def test_the_documentation_lists_every_refusal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    for refusals in (REFUSALS, PACK_REFUSALS, FLAG_REFUSALS, LAUNCH_REFUSALS):
        table = markdown_table(refusals)
        assert table in page, f"docs/megatron.md must show this, from dfa_megatron.megatron.refusals:\n{table}"
