"""The exchange between zigzag and contiguous, and the tables that it keeps."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from dfa_megatron.megatron.tokens.exchange import Relayout, TableCache, in_order, positions
from tests.support.workers import run_ranks


def exchange_there_and_back(rank: int, world_size: int) -> None:
    relayout = Relayout(dist.group.WORLD)
    generator = torch.Generator().manual_seed(world_size)
    whole, weight = torch.randn(2, 4 * world_size, 2, 3, generator=generator, dtype=torch.float64)
    mine = {layout: positions(layout, 4 * world_size, world_size, rank) for layout in ("zigzag", "contiguous")}
    rows = whole[mine["zigzag"]].requires_grad_()
    moved = relayout(rows, "zigzag", "contiguous")
    assert torch.equal(moved, whole[mine["contiguous"]])
    assert moved._base is None  # a pipeline schedule frees outputs that are no views
    assert torch.equal(relayout(moved, "contiguous", "zigzag"), rows)
    (moved * weight[mine["contiguous"]]).sum().backward()
    assert torch.equal(rows.grad, weight[mine["zigzag"]])

    for end in range(1, 4 * world_size + 1):  # every pack has plans of its own
        relayout.move(rows.detach(), DocumentOrder((0, end), (0, 4 * world_size)), "contiguous")
    held = sum(plan.sent.nbytes + plan.received.nbytes for plan in relayout._plans.values())
    assert held <= 8 * 32 * len(rows), "of eight packs"
    assert torch.equal(relayout(rows, "zigzag", "contiguous"), moved), "a plan is made again"

    tables = TableCache(capacity=2)
    exchanged = partial(in_order, relayout, 4, "zigzag")
    first = tables.rows(rows.detach(), exchanged)
    assert torch.equal(first, moved)
    assert tables.rows(rows.detach(), exchanged) is first, "the same memory is exchanged once"
    pair = tables.rows((rows.detach(), None), exchanged)
    assert (pair[0] is first, pair[1]) == (True, None)
    both = torch.randn(8, 1, dtype=torch.float64)
    for half in (both[:4], both[4:]):  # two tables in one memory
        assert torch.equal(tables.rows(half, exchanged), relayout.move(half, "zigzag", "contiguous"))
    for _ in range(5):  # older tables are let go of, and a new one is never taken for an old one
        table = torch.randn(4, 1, dtype=torch.float64) + rank
        assert torch.equal(tables.rows(table, exchanged), relayout.move(table, "zigzag", "contiguous"))
    assert len(tables._entries) == 2
    kept = [weakref.ref(table), weakref.ref(tables.rows(table, exchanged))]
    del table
    tables.rows(first, exchanged)
    assert world_size == 1 or [each() for each in kept] == [None, None], "a table that is gone is held no longer"
    with pytest.raises(UnsupportedError, match=r"a rotary table of shape \(2, 4, 1\) for 4 tokens of a rank"):
        tables.rows(torch.zeros(2, 4, 1), exchanged)  # local and global ones, stacked


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_exchange_and_its_gradient_on_real_ranks(ranks: int) -> None:
    run_ranks(ranks, exchange_there_and_back)


def test_a_table_that_an_evaluation_moved_serves_training() -> None:
    tables, table = TableCache(), torch.randn(4, 2)
    with torch.inference_mode():
        tables.rows(table, lambda rows: rows.flip(0))
    moved = tables.rows(table, lambda rows: rows.flip(0))
    x = torch.randn(4, 2, requires_grad=True)
    (x * moved).sum().backward()
    assert torch.equal(x.grad, table.flip(0))
