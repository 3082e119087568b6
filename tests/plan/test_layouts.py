"""Layouts: every token has one owner, and every rank as many tokens as the others."""

from __future__ import annotations

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import LAYOUTS, Layout, by_name, contiguous, halves


def tokens(layout: Layout, rank: int) -> list[int]:
    return [i for chunk in layout.of(rank) for i in range(layout.chunks[chunk].lo, layout.chunks[chunk].hi)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("per_rank", [2, 6, 10])
def test_the_chunks_cover_the_sequence_and_ranks_hold_equal_shares(name: str, ranks: int, per_rank: int) -> None:
    layout = by_name(name, ranks * per_rank, ranks)
    held = [tokens(layout, rank) for rank in range(ranks)]
    assert sorted(i for mine in held for i in mine) == list(range(ranks * per_rank))
    assert {len(mine) for mine in held} == {per_rank}
    assert (layout.ranks, layout.length) == (ranks, ranks * per_rank)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("per_rank", [1, 3, 4])
def test_halves_hold_the_tokens_of_contiguous(ranks: int, per_rank: int) -> None:
    for rank in range(ranks):
        mine = tokens(halves(ranks * per_rank, ranks), rank)
        assert mine == tokens(contiguous(ranks * per_rank, ranks), rank)


@pytest.mark.parametrize(("name", "length"), [("contiguous", 10), ("zigzag", 12), ("halves", 0)])
def test_a_length_that_does_not_divide_is_refused_with_one_that_does(name: str, length: int) -> None:
    with pytest.raises(UnsupportedError, match=r"for example \d+ tokens") as refusal:
        by_name(name, length, 4)
    by_name(name, int(refusal.value.instead.split()[2]), 4)
