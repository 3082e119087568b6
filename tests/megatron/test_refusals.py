"""Whatever this integration would not honour is refused by name, at set-up wherever it can be known there."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import check_config as configs
from dfa_megatron.megatron import in_order, output
from dfa_megatron.megatron.check_config import KNOWN, check_config
from dfa_megatron.megatron.layers import layer
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
from dfa_megatron.megatron.tokens import batch
from dfa_megatron.megatron.tokens import packs as documents
from dfa_megatron.runtime.comm.symmetric_memory import KeptArena
from tests.megatron.harness import Case, Topology, case, make_config

OPTIONS = MegatronConfig(data_layout="boundary")


def test_megatrons_real_config_is_read() -> None:
    check_config(make_config(Topology(), case()), OPTIONS)
    with pytest.raises(UnsupportedError, match=r"attention_dropout=0\.2.*--attention-dropout 0\.0"):
        check_config(make_config(Topology(), Case(None), attention_dropout=0.2), OPTIONS)


CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((f"{name}=True", {name: True}, {}) for name in configs.REFUSED),
    *((f"{name}=.* over several", {name: "sinkhorn"}, {}) for name in configs.OVER_RANKS),
    *((f"{name} together with remat", {name: 1}, {"checkpoint": "remat"}) for name in configs.RECOMPUTED),
    ("cpu_offloading together", {"cpu_offloading": True, "recompute_granularity": "full"}, {}),
    ("cuda_graph_impl='local'", {"cuda_graph_impl": "local"}, {}),
    ("experimental_attention_variant='dsa'.*allgather", {"experimental_attention_variant": "dsa"}, {}),
    (r"window_size=\(128, 4\)", {"window_size": (128, 4)}, {}),
    ("selective recomputation of", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, {}),
    ("together with selective recomputation", {"recompute_granularity": "selective"}, {"checkpoint": "remat"}),
    ("checkpoint='full' in Megatron", {}, {"checkpoint": "full"}),
    ("deterministic_mode=True without torch", {"deterministic_mode": True}, {}),
    ("offloading core_attn", {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, {}),
    ("loss_tile together with", {"defer_embedding_wgrad_compute": True}, {"loss_tile": 4096}),
    ("moe_enable_routing_replay in", {"moe_enable_routing_replay": True}, {}),
    ("gated delta net among the layers", {"linear_attention_freq": 4}, {"data_layout": "zigzag"}),
    ("ulysses_degree=4 on a group of 2", {}, {"ulysses_degree": 4}),
    ("ulysses_degree=2 with 5 heads", {"num_attention_heads": 5}, {"ulysses_degree": 2}),
]


@pytest.mark.support("megatron", "what is not supported is refused by name")
@pytest.mark.parametrize(("message", "fields", "options"), CONFIGS, ids=[str(n) for n in range(len(CONFIGS))])
def test_a_config_that_would_give_wrong_numbers_is_refused_by_name(
    message: str, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    plain = {"context_parallel_size": 2, "num_attention_heads": 8}
    check_config(SimpleNamespace(**plain), OPTIONS)
    with pytest.raises(UnsupportedError, match=message):
        check_config(SimpleNamespace(**plain | fields), OPTIONS.replace(**options))


def test_a_field_that_is_new_to_us_passes_while_it_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(Topology(), case())
    assert "softmax_type" in configs._read_by_megatrons()
    monkeypatch.setattr(type(config), "a_new_cap", 3.0, raising=False)
    monkeypatch.setattr(configs, "_read_by_megatrons", lambda: frozenset({"a_new_cap", "no_field"}))
    check_config(config, OPTIONS)
    config.a_new_cap = 4.0
    with pytest.raises(UnsupportedError, match=r"a_new_cap=4\.0"):
        check_config(config, OPTIONS)


@pytest.mark.parametrize("where", ["config.{}", "self.config.{}", "[config.{} for _ in x]", "(lambda: config.{})()"])
def test_what_megatrons_attention_reads_is_known_without_its_sources(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    from megatron.core.transformer import dot_product_attention as home

    made: dict[str, Any] = {}
    body = f"return {where.format('a_new_cap')} + other.no_field + config_of.neither"
    exec(f"class Newer:\n    size = 1\n    def forward(self, config, x, other, config_of):\n        {body}", made)  # noqa: S102
    monkeypatch.setattr(home, "DotProductAttention", made["Newer"])
    assert configs._read_by_megatrons.__wrapped__() - KNOWN == {"a_new_cap"}


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


def test_core_attention_refuses_what_it_would_ignore_at_a_call() -> None:
    attention, (q, k) = (
        build(pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))),
        torch.zeros(2, 4, 1, 2, 8),
    )
    for changes, message in (
        ({"attention_bias": q}, "called with attention_bias=tensor"),
        ({"attn_mask_type": "padding"}, "attn_mask_type='padding'"),
        ({"num_splits": 4}, "num_splits=4"),
        ({"packed_seq_params": object()}, "called with packed_seq_params=<object"),
        ({"query": q[:1]}, "attention of 1 rows over 4"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            attention(**{"query": q, "key": k, "value": k, **changes})


def cut_otherwise() -> Any:
    """Documents that Megatron says to have cut in another way."""
    from megatron.core.packed_seq_params import PackedSeqParams

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


CAUSAL, TWO_ROWS = masks.causal(8), torch.arange(16).view(2, 8)


def tiled_by_another_class() -> None:
    with output.deferring(of_another_class(output_layer=1), 8, {"labels": CAUSAL}):
        pass


def windowed() -> None:
    build(config=make_config(Topology(), case(), window_size=(7, 0)))._attends(CAUSAL)


def of_another_class(**parts: Any) -> Any:
    """A layer whose parts are not of the classes that are known."""
    return SimpleNamespace(**dict.fromkeys(parts, torch.nn.Linear(1, 1)))


TWO = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("delta net with", lambda: in_order.InOrderDelta(SimpleNamespace(deterministic_mode=True))),
        ("the mixer Linear where tokens are in", lambda: in_order.in_order_class(torch.nn.Linear)),
        ("the mixer Linear where tokens", lambda: layer.mixes(of_another_class(mixer=1), "contiguous")),
        ("loss_tile with an output layer of", tiled_by_another_class),
        ("--no-create-att", lambda: options_of(argparse.Namespace(create_attention_mask_in_dataloader=1, **TWO))),
        ("--reset-attention-mask", lambda: options_of(argparse.Namespace(reset_attention_mask=True))),
        (
            "fsdp2 with --calc",
            lambda: options_of(argparse.Namespace(use_torch_fsdp2=True, calculate_per_token_loss=True)),
        ),
        (
            "moe-routing-trace-path",
            lambda: options_of(argparse.Namespace(moe_routing_trace_path="a", context_parallel_size=2)),
        ),
        ("offsets into each row", lambda: batch._one_row({"tokens": torch.ones(3, 4), "cu_seqlens": torch.ones(2, 2)})),
        ("mask beside .*|cu_seqlens beside mask in", lambda: batch.pairs_of({"mask": CAUSAL, "cu_seqlens": 1})),
        ("the entry mask of a batch, Tensor", lambda: batch.pairs_of({"mask": torch.ones(1, 8)})),
        ("none: .*parent of segment 1 is", lambda: batch.pairs_of({"prompt_tree": ((4, 4), (-1, 1))})),
        ("position_ids that differ between rows", lambda: batch._with_positions({"position_ids": TWO_ROWS}, CAUSAL)),
        ("in a model with Mamba or gated delta", lambda: pack_in(1, CAUSAL, linear_attention_freq=2)),
        ("with multi-token prediction", lambda: pack_in(2, CAUSAL, "boundary", mtp_num_layers=1)),
        (r"a mask in a layer with window_size=\(7, 0\)", windowed),
        ("cp_partition_mode='contiguous'", lambda: documents.read_pack(cut_otherwise(), 2)),
        ("a document of 9 tokens", lambda: documents.with_long_padding_apart((0, 9), (0, 9), 2)),
        ("'seq_aux_loss' with 2 samples in a pack", lambda: pack_in(tokens_per_sample=4)),
        ("packs.* in a model with Mamba or gated delta", lambda: pack_in(is_hybrid_model=True)),
    ],
)
def test_a_request_is_refused_by_name(message: str, refused: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refused()


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


@pytest.mark.parametrize(
    ("entry", "form"), [(torch.arange(2), r"sample_id of a batch, \(2,\)"), (["a", "b"], "sample_id of a batch, list")]
)
def test_an_entry_that_has_no_tokens_is_named(entry: Any, form: str) -> None:
    from dfa_megatron.megatron import shard_batch

    group: Any = SimpleNamespace()
    with pytest.raises(UnsupportedError, match=form):
        shard_batch({"tokens": torch.zeros(2, 8), "sample_id": entry}, group, MegatronConfig())
