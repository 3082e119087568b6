"""Packs that are cut zigzag document by document: where documents end, and what is no such pack."""

from __future__ import annotations

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.megatron.tokens.packs import with_long_padding_apart
from tests.megatron import harness
from tests.megatron.harness import Topology
from tests.megatron.test_refused_packs import forward, pack
from tests.support.workers import run_ranks


def test_short_padding_belongs_to_its_document_and_long_padding_is_documents_of_its_own() -> None:
    real, padded = (0, 5, 6, 6, 14, 14), (0, 8, 16, 16, 24, 1624)
    assert with_long_padding_apart(real, padded, 2) == (0, 8, 16, 24, 536, 1048, 1560, 1624)
    assert with_long_padding_apart((0, 100), (0, 1624), 2) == (0, 100, 612, 1124, 1624)


def refused(rank: int, world_size: int) -> None:
    harness.start(Topology(cp=2))
    options = MegatronConfig(data_layout="boundary")
    ends = torch.tensor([0, 4, 12], dtype=torch.int32)

    def run(real: list[int], padded: torch.Tensor | None = ends, tokens: int = 6) -> None:
        forward(options, pack(real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded), tokens)

    run([0, 3, 10])
    for message, arguments in (
        ("with and without padding", ([0, 5, 10],)),
        ("with and without padding", ([0, 3, 6, 9],)),
        ("a document of 5 tokens, padding included", ([0, 5, 12], None)),
        ("it ends at 12, but the ranks hold 16 tokens", ([0, 3, 10], ends, 8)),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError if rank else DisagreementError, match="a document of 5 tokens"):
        run([0, 5, 12] if rank else [0, 4, 12], None)
    with pytest.raises(DisagreementError, match="with padding"):
        run([0, 4, 12] if rank else [0, 8, 12], None)


def test_offsets_that_fit_neither_padding_nor_tokens_nor_other_ranks_are_an_error_on_every_rank() -> None:
    run_ranks(2, refused)
