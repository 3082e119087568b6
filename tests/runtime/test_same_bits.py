"""numerics="invariant": the bits of out, lse and gradients are those of one rank, whatever ranks, layouts and packs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import layouts, masks
from dfa_megatron.plan.language.layout import Layout
from tests.support.attend import Case, Results, case, pack, results
from tests.support.bits import differing, one_rank
from tests.support.workers import run_ranks


def _same(whole: Case, rank: int, ranks: int, layout: str | Layout = "contiguous", **options: Any) -> None:
    """Compare this rank's part with its rows of what one rank computes; collective."""
    one, times = one_rank(whole), 3 if options.pop("replayed", False) else 1
    rows, columns = (whole.rows(rank, ranks, layout, side) for side in ("q", "kv"))
    want = Results(one.out[:, rows], one.lse[:, :, rows], one.dq[:, rows], one.dk[:, columns], one.dv[:, columns])
    for _ in range(times):
        got = results(whole, rank, ranks, layout=layout, numerics="invariant", **options)
        assert differing(got, want._replace(dsinks=one.dsinks)) == []


def _over_gloo(rank: int, ranks: int) -> None:
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        whole = case(ranks * 42, dtype=dtype, seed=seed, heads=4, kv_heads=2)
        _same(whole, rank, ranks, replayed=True)
        _same(whole, rank, ranks, "zigzag")
    _same(whole, rank, ranks, schedule="balanced", verify="off")
    _same(case(ranks * 30, with_sinks=True, dtype=torch.float32), rank, ranks)
    _same(case(ranks * 40, window_size=(25, 0), batch=1), rank, ranks)
    offsets = (0, 7, 60, 61, ranks * 31)
    _same(pack(offsets, dtype=torch.float32), rank, ranks, "load_balanced", replayed=True)
    held = layouts.of_lengths([*range(1, 20 * (ranks - 1), 20), 77])
    _same(case(held.length, batch=1, mask=masks.prefix_lm(held.length, 20)), rank, ranks, held)
    if ranks % 2 == 0:
        _same(case(ranks * 40, with_sinks=True), rank, ranks, ulysses_degree=2)
        _same(pack((0, 50, ranks * 31), dtype=torch.bfloat16), rank, ranks, ulysses_degree=2)


@pytest.mark.support("runtime", "the same bits on any ranks (`numerics`): layouts, packs, windows, sinks, heads")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_the_bits_of_one_rank_over_gloo(ranks: int) -> None:
    run_ranks(ranks, _over_gloo, timeout=120)
