"""Packed documents that are not clear, or that not everything is told of, are refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import harness
from tests.megatron.attends import positions
from tests.megatron.harness import Case, Topology
from tests.support.workers import run_ranks


def pack(offsets: list[int], **changes: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    longest = max(hi - lo for lo, hi in pairwise(offsets))
    given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(**{"qkv_format": "thd", **given, **changes})


def forward(options: MegatronConfig, params: Any, tokens: int, rows: int = 1, **config: Any) -> torch.Tensor:
    """A model on tokens that are the same for the same seed, whatever the pack."""
    from megatron.core import parallel_state

    topology = Topology(cp=parallel_state.get_context_parallel_world_size())
    harness.seed()
    model = harness.make_model(harness.make_config(topology, Case(options), **config), options)
    ids = torch.randint(0, harness.VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))
    held = positions("zigzag", tokens * topology.cp, topology.cp, parallel_state.get_context_parallel_rank())
    out: torch.Tensor = model(ids, held[None], None, packed_seq_params=params)
    return out


def refused_on_one_rank(rank: int, world_size: int) -> None:
    harness.start(Topology())
    options = MegatronConfig(data_layout="contiguous")
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    other = torch.tensor([0, 4, 12], dtype=torch.int32)
    for params, message in (
        (pack([0, 5, 12], qkv_format="sbhd"), "format 'sbhd'"),
        (pack([0, 5, 12], local_cp_size=2), "local_cp_size=2 and no cp_group"),
        (pack([0, 5, 12], cu_seqlens_kv=other), "a cu_seqlens_kv other than that"),
        (pack([0, 5, 12], cu_seqlens_q=None), "without cu_seqlens_q"),
        (pack([0, 5, 11]), "it ends at 11"),
        (pack([0, 8, 5, 12]), "it may not fall"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            forward(options, params, tokens=12)
    with pytest.raises(UnsupportedError, match="packed documents in 2 rows"):
        forward(options, pack([0, 5, 6]), tokens=6, rows=2)
    want = forward(options, pack([0, 5, 12]), tokens=12)
    assert torch.equal(forward(options, pack([0, 5, 5, 12, 12]), tokens=12), want)  # empty documents
    padded = pack([0, 4, 10], cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends, max_seqlen_q=7)
    assert torch.equal(forward(options, padded, tokens=12), want)
    params = pack([0, 5, 12])
    assert torch.equal(forward(options, params, tokens=12), want)
    params.cu_seqlens_q[1] = 4  # and cu_seqlens_kv, which is the same tensor
    params.max_seqlen_q = 8
    assert not torch.equal(forward(options, params, tokens=12), want)


def refused_on_two_ranks(rank: int, world_size: int) -> None:
    harness.start(Topology(cp=2))
    from megatron.core import parallel_state

    from dfa_megatron.megatron import declare_batch_layout

    with pytest.raises(UnsupportedError, match="data_layout='zigzag' that nobody is known to have cut by rows"):
        forward(MegatronConfig(data_layout="zigzag"), pack([0, 5, 12]), tokens=6)
    forward(MegatronConfig(data_layout="zigzag"), None, tokens=6)
    declare_batch_layout(parallel_state.get_context_parallel_group(), "zigzag")
    forward(MegatronConfig(data_layout="boundary"), pack([0, 5, 12]), tokens=6)


def test_packs_that_megatron_may_have_sliced_one_by_one_are_refused() -> None:
    run_ranks(2, refused_on_two_ranks)


def attention_put_back(rank: int, world_size: int) -> None:
    harness.start(Topology())
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from dfa_megatron.megatron import spec as specs

    ours = specs.distribute_attention

    def replaced(*args: Any, **kwargs: Any) -> Any:
        spec = ours(*args, **kwargs)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    specs.distribute_attention = replaced
    options = MegatronConfig(data_layout="boundary")
    with pytest.raises(UnsupportedError, match="a distributed layer whose core_attention became DotProductAttention"):
        forward(options, None, tokens=12)


def stage_without_documents(rank: int, world_size: int) -> None:
    harness.start(Topology())
    from dfa_megatron.megatron.script import dfa_flags

    options = MegatronConfig(data_layout="contiguous")
    with patch.object(dfa_flags, "global_args", lambda: SimpleNamespace(sft=True)):
        forward(options, pack([0, 5, 12]), tokens=12)
        with pytest.raises(UnsupportedError, match="a pipeline stage that was given no packed_seq_params"):
            forward(options, None, tokens=12)


def on_one_rank(rank: int, world_size: int) -> None:
    for refused in (refused_on_one_rank, stage_without_documents, attention_put_back):
        refused(rank, world_size)


def test_packs_that_are_not_clear_stages_that_are_told_none_and_attention_put_back_are_refused() -> None:
    run_ranks(1, on_one_rank)
