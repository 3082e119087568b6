"""Tokens inside of a model: their exchange between layouts, and the rows of rotary tables that layers make inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.rotary import order_rotary
from dfa_megatron.megatron.stand_in import use_cpu
from dfa_megatron.megatron.tokens.packs import Pack
from dfa_megatron.megatron.tokens.visit import Exchange, Visit, running
from dfa_megatron.plan.language.layout import zigzag_documents
from tests.megatron.attends import positions
from tests.support.workers import run_ranks


def exchange_there_and_back(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    generator = torch.Generator().manual_seed(world_size)
    length = 4 * world_size
    whole, weight = torch.randn(2, length, 2, 3, generator=generator, dtype=torch.float64)
    mine = {name: positions(name, length, world_size, rank) for name in ("zigzag", "contiguous")}
    rows = whole[mine["zigzag"]].requires_grad_()
    moved = exchange(rows, "zigzag", "contiguous")
    assert torch.equal(moved, whole[mine["contiguous"]])
    assert moved._base is None  # a pipeline schedule frees outputs that are no views
    assert torch.equal(exchange(moved, "contiguous", "zigzag"), rows)
    (moved * weight[mine["contiguous"]]).sum().backward()
    assert torch.equal(rows.grad, weight[mine["zigzag"]])

    for end in range(1, length + 1):  # every pack has plans of its own
        documents = zigzag_documents((0, end, length), world_size)
        if documents.tokens(rank) == len(rows):
            exchange.move(rows.detach(), documents, "contiguous")
    held = sum(plan.sent.nbytes + plan.received.nbytes for plan in exchange._plans.values())
    assert held <= 8 * 32 * len(rows), "of eight packs"
    assert torch.equal(exchange(rows, "zigzag", "contiguous"), moved), "a plan is made again"


def test_an_exchange_and_its_gradient_on_real_ranks() -> None:
    run_ranks(3, exchange_there_and_back)


class Numbers(torch.nn.Module):
    """A table of token numbers."""

    def forward(self, length: int, offset: int = 0) -> torch.Tensor:
        return torch.arange(offset, offset + length)


def call(tokens: int, pack: Pack | None = None) -> Any:
    """The call of a model whose ranks hold so many tokens each."""
    group = dist.group.WORLD
    assert group is not None
    return running(Visit(None, group, "contiguous", "contiguous", pack, (1, tokens), Exchange(group)))


def _rows_of_lengths_and_offsets(rank: int, ranks: int) -> list[list[int]]:
    use_cpu()
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    made = [
        YarnRotaryEmbedding(
            8, scaling_factor=4.0, original_max_position_embeddings=16, use_cpu_initialization=True, cp_group=group
        )
        for group in (dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True))
    ]
    owner, whole = torch.nn.Module(), made[1]
    owner.rotary_pos_emb = made[0]
    for _ in range(2):  # as often as one likes
        order_rotary(owner)
    for length in (8, 48, 24, 24, 48):  # shorter and longer than what it was built for, and than the last
        with call(length // ranks):
            table, factor = owner.rotary_pos_emb(length)
            parts = owner.rotary_pos_emb.get_cached_cos_sin(length, dtype=torch.float64)
        expected = whole(length)[0].chunk(ranks)[rank]
        assert factor == whole(length)[1]
        assert torch.equal(table, expected), length
        for part, wanted in zip(parts, (expected.cos() * factor, expected.sin() * factor), strict=True):
            assert torch.equal(part, wanted.double()), length
    assert torch.equal(owner.rotary_pos_emb(48)[0], whole(48)[0]), "outside of a call it is whole"
    with torch.inference_mode(), call(8):
        owner.rotary_pos_emb(16)
    with call(8):  # the rows that an evaluation made serve training
        (torch.ones(8, 1, 1, 8, requires_grad=True) * owner.rotary_pos_emb(16)[0]).sum().backward()

    owner.rotary_pos_emb = Numbers()
    order_rotary(owner)
    rows = []
    for length, offset, pack in ((4, 0, None), (4, 6, None), (4, 6, None), (8, 6, None), (8, 0, Pack((0, 3, 8)))):
        with call(length // ranks, pack):
            rows.append(owner.rotary_pos_emb(length, offset=offset).tolist())
    with call(4), pytest.raises(UnsupportedError, match=r"a rotary table of shape \(4,\) for 8 positions"):
        owner.rotary_pos_emb(4)
    return rows


def test_a_rotary_table_is_of_this_ranks_tokens_and_known_by_its_length_its_offset_and_its_documents() -> None:
    assert run_ranks(2, _rows_of_lengths_and_offsets) == [
        [[0, 1], [6, 7], [6, 7], [6, 7, 8, 9], [0, 1, 2, 0]],
        [[2, 3], [8, 9], [8, 9], [10, 11, 12, 13], [1, 2, 3, 4]],
    ]


def test_an_attention_without_a_module_for_its_table_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="whose rows could be chosen"):
        order_rotary(torch.nn.Module())
