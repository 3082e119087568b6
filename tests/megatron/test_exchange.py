"""The exchange between the layouts of the tokens outside and inside of a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.megatron.tokens.visit import Exchange
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


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_exchange_and_its_gradient_on_real_ranks(ranks: int) -> None:
    run_ranks(ranks, exchange_there_and_back)
