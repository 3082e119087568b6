"""Packs in Transformer Engine's order of tokens: where each token stands, and what is no such pack."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from tests.megatron import harness
from tests.megatron.harness import Topology
from tests.megatron.test_refused_packs import forward, pack
from tests.support.workers import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_real_token_stands_in_order_and_padding_behind_them_in_documents_within_a_rank(ranks: int) -> None:
    step, lengths = 2 * ranks, (5, 1, 0, 4 * ranks, 3)
    rooms = [-(-n // step) * step + step * (n == 1) for n in lengths]
    offsets = [[0, *torch.tensor(sizes).cumsum(0).tolist()] for sizes in (lengths, rooms)]
    order = DocumentOrder.of((*offsets[0], offsets[0][-1]), (*offsets[1], offsets[1][-1]), ranks)
    held = torch.cat([order.positions(ranks, rank) for rank in range(ranks)])
    assert held.sort().values.tolist() == list(range(sum(rooms)))
    inside, share = order.inside(ranks), sum(rooms) // ranks
    real = [offset for offset in inside if offset <= sum(lengths)]
    assert real == sorted(set(offsets[0]))
    assert inside[-1] == sum(rooms)
    padding = inside[len(real) - 1 :]
    assert all(lo // share == (hi - 1) // share for lo, hi in pairwise(padding))
    assert max(hi - lo for lo, hi in pairwise(inside)) == max(lengths)


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
        ("packed documents of 12 tokens, padding included", ([0, 3, 10], ends, 8)),
    ):
        with pytest.raises(UnsupportedError, match=message):
            run(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError if rank else DisagreementError, match="a document of 5 tokens"):
        run([0, 5, 12] if rank else [0, 4, 12], None)
    with pytest.raises(DisagreementError, match="with padding"):
        run([0, 4, 12] if rank else [0, 8, 12], None)


def test_offsets_that_fit_neither_padding_nor_tokens_nor_other_ranks_are_an_error_on_every_rank() -> None:
    run_ranks(2, refused)
