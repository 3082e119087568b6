"""Packed documents that are not clear, that not everything is told of, or that ranks tell differently, are refused."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.megatron import declare_batch_layout, shard_batch
from dfa_megatron.megatron.check_config import check_uneven
from dfa_megatron.megatron.script import dfa_flags
from dfa_megatron.megatron.tokens.packs import with_long_padding_apart
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY
from tests.megatron.attends import positions
from tests.support import megatron_model
from tests.support.arguments import assert_refused
from tests.support.workers import run_each


def pack(offsets: list[int], **changes: Any) -> Any:
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    longest = max(hi - lo for lo, hi in pairwise(offsets))
    given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(**{"qkv_format": "thd", **given, **changes})


def forward(layout: str, params: Any, tokens: int, rows: int = 1) -> torch.Tensor:
    """A model on tokens that are the same whatever the pack."""
    ranks, rank = (getattr(parallel_state, f"get_context_parallel_{n}")() for n in ("world_size", "rank"))
    model = harness.model_of(like("plain", {"cp": ranks}, layout))
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))
    held = positions("zigzag", tokens * ranks, ranks, rank)
    out: torch.Tensor = model(ids, held[None], None, packed_seq_params=params)
    return out


def refused_on_one_rank(rank: int, world_size: int) -> None:
    harness.start(like("plain"))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    other = torch.tensor([0, 4, 12], dtype=torch.int32)
    for params, message, rows in (
        (pack([0, 5, 12], qkv_format="sbhd"), "format 'sbhd'", 1),
        (pack([0, 5, 12], local_cp_size=2), "local_cp_size=2 and no cp_group", 1),
        (pack([0, 5, 12], cu_seqlens_kv=other), "a cu_seqlens_kv other than that", 1),
        (pack([0, 5, 12], cu_seqlens_q=None), "without cu_seqlens_q", 1),
        (pack([0, 5, 11]), "it ends at 11", 1),
        (pack([0, 8, 5, 12]), "it may not fall", 1),
        (pack([0, 5, 12]), "packed documents in 2 rows", 2),
    ):
        assert_refused(message, forward, "contiguous", params, 12, rows)
    want = forward("contiguous", pack([0, 5, 12]), 12)
    assert torch.equal(forward("contiguous", pack([0, 5, 5, 12, 12]), 12), want)  # empty documents
    padded = pack([0, 4, 10], cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends, max_seqlen_q=7)
    assert torch.equal(forward("contiguous", padded, 12), want)
    params = pack([0, 5, 12])
    assert torch.equal(forward("contiguous", params, 12), want)
    params.cu_seqlens_q[1] = 4  # and cu_seqlens_kv, which is the same tensor
    params.max_seqlen_q = 8
    assert not torch.equal(forward("contiguous", params, 12), want)


def several_rows(rank: int, world_size: int) -> None:
    """A stage without tokens gets the documents of every row, of which a router's loss is to be one by one."""
    row = like("packed experts", config={"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1})
    harness.start(row)
    whole, group = row.global_batch(0)[0], parallel_state.get_context_parallel_group()
    parts = (whole, {"cu_seqlens": whole["cu_seqlens"]})
    batch, stage = (shard_batch(x, group, harness.options_of(row)) for x in parts)
    assert stage["packed_seq_params"].pack.offsets == batch["packed_seq_params"].pack.offsets
    assert_refused(f"'seq_aux_loss' with {row.batch} samples", harness.model_of(row), **harness.taken(batch))


def stage_without_documents(rank: int, world_size: int) -> None:
    harness.start(like("plain"))
    with patch.object(dfa_flags, "global_args", lambda: SimpleNamespace(sft=True)):
        forward("contiguous", pack([0, 5, 12]), 12)
        assert_refused("a pipeline stage that was given no packed_seq_params", forward, "contiguous", None, 12)


def attention_put_back(rank: int, world_size: int) -> None:
    harness.start(like("plain"))
    ours = megatron_model.distribute_attention

    def replaced(*args: Any, **kwargs: Any) -> Any:
        spec = ours(*args, **kwargs)
        spec.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    message = "a distributed layer whose core_attention became DotProductAttention"
    with patch.object(megatron_model, "distribute_attention", replaced), pytest.raises(UnsupportedError, match=message):
        forward("boundary", None, 12)


def test_packs_that_are_not_clear_stages_that_are_told_none_and_attention_put_back_are_refused() -> None:
    run_each(1, refused_on_one_rank, several_rows, stage_without_documents, attention_put_back)


def refused_on_two_ranks(rank: int, world_size: int) -> None:
    """Packs that Megatron may have sliced one by one, and that fit neither padding nor tokens nor other ranks."""
    harness.start(like("plain", {"cp": 2}))
    ends = torch.tensor([0, 4, 12], dtype=torch.int32)

    def run(real: list[int], padded: torch.Tensor | None = ends, tokens: int = 6) -> None:
        forward("boundary", pack(real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded), tokens)

    run([0, 3, 10])
    for message, arguments in (
        ("with and without padding", ([0, 5, 10],)),
        ("with and without padding", ([0, 3, 6, 9],)),
        ("a document of 5 tokens, padding included", ([0, 5, 12], None)),
        ("it ends at 12, but the ranks hold 16 tokens", ([0, 3, 10], ends, 8)),
    ):
        assert_refused(message, run, *arguments)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError if rank else DisagreementError, match="a document of 5 tokens"):
        run([0, 5, 12] if rank else [0, 4, 12], None)
    with pytest.raises(DisagreementError, match="with padding"):
        run([0, 4, 12] if rank else [0, 8, 12], None)
    with pytest.raises(UnsupportedError, match="data_layout='zigzag' that nobody is known to have cut by rows"):
        forward("zigzag", pack([0, 5, 12]), 6)
    forward("zigzag", None, 6)
    declare_batch_layout(parallel_state.get_context_parallel_group(), "zigzag")
    forward("boundary", pack([0, 5, 12]), 6)


def equal_parts(rank: int, world_size: int) -> None:
    row = like("packed", {"cp": 2}, batch=1, tokens=7)
    for changes, words in (
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "pipeline"),
        ({"num_moe_experts": 4, "expert_model_parallel_size": 2}, "expert parallelism"),
        ({}, "4 of them on rank 0"),
    ):
        config = harness.config_of(row)
        vars(config).update(changes)
        assert_refused(words, check_uneven, config, [5, 4], 5 if changes else 4, 0)
    harness.start(row)
    config = harness.config_of(row)
    model = harness.model_of(row, config)
    config.num_moe_experts, config.expert_model_parallel_size = 4, 2
    assert_refused("expert parallelism", model, **harness.taken(next(harness.batches(row))))


def test_packs_sliced_otherwise_offsets_that_do_not_fit_and_parts_that_take_equal_rows_are_refused() -> None:
    run_each(2, refused_on_two_ranks, equal_parts)


def test_short_padding_belongs_to_its_document_and_long_padding_is_documents_of_its_own() -> None:
    real, padded = (0, 5, 6, 6, 14, 14), (0, 8, 16, 16, 24, 1624)
    assert with_long_padding_apart(real, padded, 2) == (0, 8, 16, 24, 536, 1048, 1560, 1624)
    assert with_long_padding_apart((0, 100), (0, 1624), 2) == (0, 100, 612, 1124, 1624)
