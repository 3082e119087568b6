"""Whatever this integration would not honour is refused by name, at set-up wherever it can be known there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron import distribute_attention, in_order, output, shard_batch
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.layers import layer, replay
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of, prepare
from dfa_megatron.megatron.tested_fields import REFUSED as REFUSED_FIELDS
from dfa_megatron.megatron.tested_fields import TRIED
from dfa_megatron.megatron.tokens import batch
from dfa_megatron.megatron.tokens import packs as documents
from dfa_megatron.whole_batch import pairs_of
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import FULL, like
from tests.support.arguments import assert_refused

OPTIONS = MegatronConfig(data_layout="boundary")


def config_of(**changes: Any) -> Any:
    return harness.config_of(like("plain"), **changes)


def check(fields: dict[str, Any], **options: Any) -> None:
    plain = {"context_parallel_size": 2, "num_attention_heads": 8}
    check_config(SimpleNamespace(**plain | fields), OPTIONS.replace(**options))


def test_what_is_not_set_is_not_refused() -> None:
    check({})
    check_config(config_of(), OPTIONS)
    check_config(config_of(**FULL), OPTIONS.replace(remat_offload=True))
    check_config(config_of(), OPTIONS.replace(remat_offload=True, checkpoint="remat"))
    build(cp_comm_type="dfa", softmax_scale=0.5, k_channels=24, v_channels=16)


def check_changed(**fields: Any) -> None:
    config = config_of()
    vars(config).update(fields)
    check_config(config, OPTIONS)


def test_a_field_that_is_new_to_us_passes_at_its_default_and_one_of_a_subclass_with_any_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_changed(of_a_subclass=1, layernorm_epsilon=1e-6)
    monkeypatch.delitem(TRIED, "layernorm_epsilon")
    check_changed()
    assert_refused(r"layernorm_epsilon=1e-06: no test .* leaving it at 1e-05", check_changed, layernorm_epsilon=1e-6)


def build(**changes: Any) -> DistributedCoreAttention:
    arguments: dict[str, Any] = {
        "config": config_of(), "layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self",
        "pg_collection": SimpleNamespace(cp=None), "options": OPTIONS,
    }  # fmt: skip
    return DistributedCoreAttention(**{**arguments, **changes})


def call(**changes: Any) -> None:
    q, k = torch.zeros(2, 4, 1, 2, 8)
    build(pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 2)))(
        **{"query": q, "key": k, "value": k, **changes}
    )


def cut_otherwise() -> Any:
    """Documents that Megatron says to have cut in another way."""
    ends = torch.tensor([0, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    params.cp_partition_mode = "contiguous"
    return params


class Flags(SimpleNamespace):
    """Facts of which the others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def pack_in(ranks: int = 2, pairs: Any = None, layout: str = "zigzag", **fields: Any) -> None:
    config = Flags(context_parallel_size=ranks, moe_router_load_balancing_type="seq_aux_loss", **fields)
    context, model = AttentionContext(OPTIONS.replace(data_layout=layout)), Flags(config=config)
    packed, group = Flags(tokens_per_sample=fields.get("tokens_per_sample")), SimpleNamespace(size=lambda: 1)
    context._check_pack(model, packed, documents.Pack((0, 8), pairs), group)  # type: ignore[arg-type]


VISIT: Any = Flags(model=Flags(config=Flags()), rows=(2, 2))
CAUSAL, TWO_ROWS = masks.causal(8), torch.arange(16).view(2, 8)


def tiled_by_another_class() -> None:
    with output.deferring(of_another_class(output_layer=1), 8, {"labels": CAUSAL}):
        pass


def windowed() -> None:
    build(config=config_of(window_size=(7, 0)))._attends(CAUSAL)


def of_another_class(**parts: Any) -> Any:
    """A layer whose parts are not of the classes that are known."""
    return SimpleNamespace(**dict.fromkeys(parts, torch.nn.Linear(1, 1)))


def flags(**given: Any) -> None:
    options_of(argparse.Namespace(**given))


def core_of(core_attention: Any) -> None:
    """Distribute a layer with an attention that does more than the config says."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    distribute_attention(spec, config_of(), config=OPTIONS)


def entry_of(entry: Any) -> None:
    group: Any = SimpleNamespace()
    shard_batch({"tokens": torch.zeros(2, 8), "sample_id": entry}, group, MegatronConfig())


class Capped(DotProductAttention):  # type: ignore[misc,unused-ignore]
    """As of models with capped scores."""


ELSEWHERE = type("DotProductAttention", (), {})
"""Another package's attention by the same name."""
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
NOT_TRIED = (
    *("batch_invariant_mode", "flash_decode", "fp8_dot_product_attention", "fp8_multi_head_attention"),
    *("hierarchical_context_parallel_sizes", "use_kitchen_attention", "fp4", "cpu_offloading", "offload_modules"),
    *("defer_embedding_wgrad_compute", "fine_grained_activation_offloading"),
    "num_microbatches_with_partial_activation_checkpoints",
)
OVERLAP = "overlap_moe_expert_parallel_comm"
SPEC = ["--spec", "dfa_megatron.megatron", "get_spec"]
ENDS = {"tokens": torch.ones(3, 4), "cu_seqlens": torch.ones(2, 2)}

REFUSED: list[tuple[str, Callable[[], Any]]] = [
    *((f"{name}=True", partial(check, {name: True})) for name in REFUSED_FIELDS),
    *((f"{name}=2: no test", partial(check_changed, **{name: 2})) for name in NOT_TRIED),
    ("sinkhorn' over several", lambda: check({"moe_router_load_balancing_type": ["sinkhorn"]})),
    ("cuda_graph_impl='local'", lambda: check({"cuda_graph_impl": "local"})),
    ("experimental_attention_variant='dsa'.*allgather", lambda: check({"experimental_attention_variant": "dsa"})),
    (r"window_size=\(128, 4\)", lambda: check({"window_size": (128, 4)})),
    ("selective recomputation of", lambda: check(CORE)),
    ("together with selective", lambda: check({"recompute_granularity": "selective"}, checkpoint="remat")),
    ("checkpoint='full' in Megatron", lambda: check({}, checkpoint="full")),
    ("deterministic_mode=True without torch", lambda: check({"deterministic_mode": True})),
    ("gated delta net among the layers", lambda: check({"linear_attention_freq": 4}, data_layout="zigzag")),
    ("ulysses_degree=4 on a group of 2", lambda: check({}, ulysses_degree=4)),
    ("ulysses_degree=2 with 5 heads", lambda: check({"num_attention_heads": 5}, ulysses_degree=2)),
    ("remat_offload without --recompute-granularity full", lambda: check({}, remat_offload=True)),
    (r"attention_dropout=0\.2.*--attention-dropout 0\.0", lambda: check_changed(attention_dropout=0.2)),
    ("attn_mask_type='padding'", lambda: build(attn_mask_type=AttnMaskType.padding)),
    ("attention_type='cross'", lambda: build(attention_type="cross")),
    ("attention_dropout=0.1", lambda: build(attention_dropout=0.1)),
    ("cp_comm_type='a2a'", lambda: build(cp_comm_type="a2a")), ("num_splits=4", lambda: build(num_splits=4)),
    ("called with attention_bias=tensor", lambda: call(attention_bias=torch.ones(1))),
    ("attn_mask_type='padding'", lambda: call(attn_mask_type="padding")), ("num_splits=4", lambda: call(num_splits=4)),
    ("called with packed_seq_params=<object", lambda: call(packed_seq_params=object())),
    ("attention of 1 rows over 4", lambda: call(query=torch.zeros(1, 1, 2, 8))),
    ("core_attention to replace", lambda: distribute_attention(object(), config_of(), config=OPTIONS)),
    ("core_attention to replace", lambda: distribute_attention(ModuleSpec(object), config_of(), config=OPTIONS)),
    (
        "core_attention to replace",
        lambda: distribute_attention(ModuleSpec(dict, submodules=get_gpt_layer_local_spec().submodules), config_of()),
    ),
    ("core_attention is .*would be dropped", lambda: core_of(Capped)),
    ("core_attention is .*would be dropped", lambda: core_of(ELSEWHERE)),
    ("is .*would be dropped", lambda: core_of(ModuleSpec(DotProductAttention, params={"softmax_scale": 0.1}))),
    ("delta net with", lambda: in_order.InOrderDelta(SimpleNamespace(deterministic_mode=True))),
    ("the mixer Linear where tokens are in", lambda: in_order.in_order_class(torch.nn.Linear)),
    ("the mixer Linear where tokens", lambda: layer.mixes(of_another_class(mixer=1), "contiguous")),
    ("loss_tile with an output layer of", tiled_by_another_class),
    ("a router_replay of tests", lambda: replay.replays_of(Flags(modules=lambda: [Flags(router_replay=Flags())]))),
    ("replay for 8 tokens, where .* has 4", lambda: replay._move(VISIT, [torch.ones(8, 2)], back=False)),
    ("expert_parallel_comm with remat", lambda: check({OVERLAP: True}, checkpoint="remat")),
    ("expert_parallel_comm with mtp_num_layers", lambda: check({OVERLAP: True, "mtp_num_layers": 1})),
    ("recomputation of core_attn or gdn", lambda: check({**CORE, "recompute_modules": ["gdn"]})),
    ("--no-create-att", lambda: flags(create_attention_mask_in_dataloader=1, context_parallel_size=2)),
    ("--reset-attention-mask", lambda: flags(reset_attention_mask=True)),
    ("fsdp2 with --calc", lambda: flags(use_torch_fsdp2=True, calculate_per_token_loss=True)),
    ("moe-routing-trace-path", lambda: flags(moe_routing_trace_path="a", context_parallel_size=2)),
    ("without --spec", lambda: prepare(["--dfa-data-layout", "zigzag"])),
    ("contiguous in a script.*boundary", lambda: prepare([*SPEC, "--dfa-data-layout", "contiguous"])),
    ("without --spec", lambda: prepare(["--spec"])), ("--spec local", lambda: prepare(["--spec", "local"])),
    ("--yaml-cfg", lambda: prepare([*SPEC, "--yaml-cfg", "a.yaml"])),
    ("--use-legacy-models", lambda: prepare([*SPEC, "--use-legacy-models"])),
    ("offsets into each row", lambda: batch._one_row(ENDS)),
    ("a mask beside cu_seqlens", lambda: pairs_of({"mask": CAUSAL, "cu_seqlens": 1}, "cu_seqlens")),
    ("a mask that does not fit: it is of type Tensor", lambda: pairs_of({"mask": torch.ones(1, 8)})),
    ("not fit: .*parent of segment 1 is", lambda: pairs_of({"prompt_tree": ((4, 4), (-1, 1))})),
    ("position_ids that differ between rows", lambda: batch._with_positions({"position_ids": TWO_ROWS}, CAUSAL)),
    (r"sample_id of a batch, \(2,\)", lambda: entry_of(torch.arange(2))),
    ("sample_id of a batch, list", lambda: entry_of(["a", "b"])),
    ("in a model with Mamba or gated delta", lambda: pack_in(1, CAUSAL, linear_attention_freq=2)),
    ("with multi-token prediction", lambda: pack_in(2, CAUSAL, "boundary", mtp_num_layers=1)),
    (r"a mask in a layer with window_size=\(7, 0\)", windowed),
    ("cp_partition_mode='contiguous'", lambda: documents.read_pack(cut_otherwise(), 2)),
    ("a document of 9 tokens", lambda: documents.with_long_padding_apart((0, 9), (0, 9), 2)),
    ("'seq_aux_loss' with 2 samples in a pack", lambda: pack_in(tokens_per_sample=4)),
    ("packs.* in a model with Mamba or gated delta", lambda: pack_in(is_hybrid_model=True)),
]  # fmt: skip


@pytest.mark.support("megatron", "what is not supported is refused by name")
@pytest.mark.parametrize(("message", "refused"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_a_request_is_refused_by_name(message: str, refused: Callable[[], Any]) -> None:
    assert_refused(message, refused)


def test_core_attention_of_plain_softmax_has_no_parameters_and_the_head_dimension_sets_the_scale() -> None:
    attention = build()
    assert not list(attention.parameters())
    assert not attention.state_dict()
    assert attention.softmax_scale == attention.config.kv_channels**-0.5
    assert build(k_channels=36).softmax_scale == 36**-0.5
    assert build(softmax_scale=0.5, k_channels=36).softmax_scale == 0.5


def parse(*flags: str) -> argparse.Namespace:
    return add_dfa_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_the_help_of_a_flag_names_the_default_that_it_has_there() -> None:
    shown = " ".join(add_dfa_arguments(argparse.ArgumentParser()).format_help().split())
    assert "attention works on them as they are. Default: boundary." in shown
    shown = " ".join(MegatronConfig.add_arguments(argparse.ArgumentParser()).format_help().split())
    assert "attention works on them as they are. Default: contiguous." in shown


def test_flags_become_options_and_scripts_default_to_their_own_data_order() -> None:
    assert options_of(parse()).data_layout == "boundary"
    assert options_of(argparse.Namespace()).data_layout == "boundary"
    assert options_of() == MegatronConfig(data_layout="boundary")
    options = options_of(parse("--dfa-data-layout", "contiguous", "--dfa-schedule", "ring"))
    assert options == MegatronConfig(data_layout="contiguous", schedule="ring")
