"""Whatever this integration would not honour is refused by name, at set-up wherever it can be known there."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.refusals import check_config
from dfa_megatron.megatron.start.dfa_flags import add_dfa_arguments, options_of
from dfa_megatron.runtime.comm.memory.kept_arena import KeptArena
from tests.megatron.harness import Case, Topology, case, make_config

OPTIONS = DistAttentionConfig(data_layout="boundary")


def test_the_layouts_that_keep_megatrons_order_refuse_less() -> None:
    for fields in ({"multi_latent_attention": True}, {"is_hybrid_model": True}):
        check_config(SimpleNamespace(context_parallel_size=2, **fields), DistAttentionConfig(data_layout="zigzag"))


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


def test_stages_of_a_pipeline_keep_the_memory_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptArena, "gives_back", True)
    for stages in (1, 2):
        changes = {"pipeline_model_parallel_size": stages, "pipeline_dtype": torch.float32}
        build(config=make_config(Topology(), case(), **changes))
        assert KeptArena.gives_back is (stages == 1)


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
    shown = " ".join(DistAttentionConfig.add_arguments(argparse.ArgumentParser(), "megatron").format_help().split())
    assert "attention works on them as they are. Default: contiguous." in shown


def test_flags_become_options_and_scripts_default_to_their_own_data_order() -> None:
    assert options_of(parse()).data_layout == "boundary"
    assert options_of(argparse.Namespace()).data_layout == "boundary"
    assert options_of() == DistAttentionConfig(data_layout="boundary")
    options = options_of(parse("--dfa-data-layout", "contiguous", "--dfa-schedule", "ring", "--dfa-deterministic"))
    assert options == DistAttentionConfig(data_layout="contiguous", schedule="ring", deterministic=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"logits_load_dir": "logits", "logits_save_dir": "logits"},
        {"logits_load_dir": "logits", "dfa_data_layout": "zigzag"},
        {"moe_routing_trace_path": "trace", "dfa_data_layout": "contiguous"},
    ],
)
def test_files_that_go_by_the_place_of_tokens_are_taken_where_it_is_that_of_the_batch(fields: dict[str, Any]) -> None:
    options_of(argparse.Namespace(context_parallel_size=2, **fields))


def test_packed_data_of_scripts_are_taken_where_the_layout_knows_how_they_are_sliced() -> None:
    for fields in (
        {"sft": True, "context_parallel_size": 1, "dfa_data_layout": "zigzag"},
        {"dataloader_inter_document_masking": True, "context_parallel_size": 2},
    ):
        options_of(argparse.Namespace(**fields))


@pytest.mark.parametrize(
    ("entry", "form"), [(torch.arange(2), r"sample_id of a batch, \(2,\)"), (["a", "b"], "sample_id of a batch, list")]
)
def test_an_entry_that_has_no_tokens_is_named(entry: Any, form: str) -> None:
    from dfa_megatron.megatron import shard_batch

    group: Any = SimpleNamespace()
    with pytest.raises(UnsupportedError, match=form):
        shard_batch({"tokens": torch.zeros(2, 8), "sample_id": entry}, group, DistAttentionConfig())
