"""Layouts: every token has one owner; the ranks may hold numbers of tokens that differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import (
    LAYOUTS,
    Layout,
    by_name,
    contiguous,
    cross,
    of_lengths,
    zigzag_documents,
)  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [1, 5, 16, 29, 48])
def test_the_chunks_cover_the_sequence_and_ranks_hold_about_equal_shares(name: str, ranks: int, length: int) -> None:
    layout = by_name(name, length, ranks)
    held = [layout.positions(rank) for rank in range(ranks)]
    assert sorted(i for mine in held for i in mine) == list(range(length))
    counts = [layout.tokens(rank) for rank in range(ranks)]
    assert counts == [len(mine) for mine in held]
    if name == "contiguous":
        assert counts == [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    assert max(counts) - min(counts) <= (1 if name == "contiguous" else 2)
    assert (layout.ranks, layout.length) == (ranks, length)


@pytest.mark.parametrize("lengths", [(9, 9), (1, 1, 1), (4, 0, 3), (0, 7), (5, 0)])
def test_halves_hold_the_tokens_of_their_layout(lengths: tuple[int, ...]) -> None:
    layout = of_lengths(lengths)
    halves = layout.halved()
    assert [halves.positions(rank) for rank in range(len(lengths))] == [
        layout.positions(rank) for rank in range(len(lengths))
    ]
    assert [layout.tokens(rank) for rank in range(len(lengths))] == list(lengths)
    assert halves.joined() == layout


def test_two_sequences_have_one_layout_and_each_side_its_own_rows() -> None:
    draw = random.Random(40)
    for _ in range(50):
        ranks = draw.randint(1, 5)
        queries = of_lengths([draw.choice([0, 1, 4]) for _ in range(ranks - 1)] + [3])
        keys = by_name(draw.choice([*LAYOUTS]), draw.randint(1, 20), ranks)
        both = cross(queries, keys)
        assert both.side("q") == queries
        assert both.side("kv") == keys
        for rank in range(ranks):
            assert both.tokens(rank, "q") == queries.tokens(rank)
            assert both.tokens(rank, "kv") == keys.tokens(rank)
            assert both.joined().tokens(rank, "q") == queries.tokens(rank), "no chunk is of both sequences"
            rows = [*both.rows(rank).values()]
            assert sum(row == 0 for row in rows) == (queries.tokens(rank) > 0) + (keys.tokens(rank) > 0)
    with pytest.raises(UnsupportedError, match="queries on 2 ranks, keys on 3"):
        cross(contiguous(4, 2), contiguous(4, 3))


def test_documents_are_cut_zigzag_one_by_one() -> None:
    layout = zigzag_documents((0, 8, 11), 2)
    assert [layout.positions(rank) for rank in (0, 1)] == [[0, 1, 6, 7, 8], [2, 3, 4, 5, 9, 10]]
    assert not layout.in_order
    assert isinstance(hash(layout), int)
    assert Layout(layout.chunks, layout.owner) == layout


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda: of_lengths([5, -2, 4]), r"lengths \[5, -2, 4\]"),
        (lambda: zigzag_documents((0, 8, 4), 2), "-4 tokens in 4 parts"),
        (lambda: zigzag_documents((4, 8), 2), "the first document starts at 0"),
        (lambda: zigzag_documents((), 2), "the first document starts at 0"),
        *((partial(cut, 16, ranks), "16 tokens in .* parts") for cut in LAYOUTS.values() for ranks in (0, -1)),
    ],
)
def test_numbers_that_are_no_counts_are_refused(refused: Callable[[], Layout], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        refused()


@pytest.mark.parametrize(("name", "length"), [("contiguous", 0), ("zigzag", -1), ("striped", 8)])
def test_no_tokens_and_no_such_layout_are_refused(name: str, length: int) -> None:
    with pytest.raises(UnsupportedError):
        by_name(name, length, 4)
