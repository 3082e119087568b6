"""Tiles against brute force: every operation on thousands of small random tiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import pytest

from dfa_megatron.plan.language.geometry import CAUSAL, FULL, UNBOUNDED, Band, Span, Tile, covers

Pairs = set[tuple[int, int]]


def pairs(tile: Tile | None) -> Pairs:
    if tile is None:
        return set()
    return {
        (i, j)
        for i in range(tile.q.lo, tile.q.hi)
        for j in range(tile.kv.lo, tile.kv.hi)
        if tile.lo <= j - i <= tile.hi
    }


def random_span(rng: random.Random) -> Span:
    lo = rng.randint(0, 9)
    return Span(lo, lo + rng.randint(-1, 7))


def random_tile(rng: random.Random) -> Tile:
    lo = rng.choice([-UNBOUNDED, rng.randint(-10, 8)])
    hi = rng.choice([UNBOUNDED, rng.randint(-8, 10)])
    return Tile(random_span(rng), random_span(rng), lo, hi)


def tiles(seed: int, count: int = 3000) -> Iterator[tuple[Tile, random.Random]]:
    rng = random.Random(seed)
    return ((random_tile(rng), rng) for _ in range(count))


def test_shrinking_keeps_the_pairs_and_leaves_no_empty_row_or_column() -> None:
    for tile, _ in tiles(1):
        small = tile.shrink()
        assert pairs(small) == pairs(tile)
        assert (small is None) == (not pairs(tile))
        if small:
            assert {i for i, _ in pairs(small)} == set(range(small.q.lo, small.q.hi))
            assert {j for _, j in pairs(small)} == set(range(small.kv.lo, small.kv.hi))


def test_shrunk_tiles_with_the_same_pairs_are_equal() -> None:
    known: dict[frozenset[tuple[int, int]], Tile] = {}
    for tile, _ in tiles(2, 6000):
        small = tile.shrink()
        if small:
            assert known.setdefault(frozenset(pairs(small)), small) == small


def test_the_area_counts_the_pairs() -> None:
    for tile, _ in tiles(3):
        assert tile.area == len(pairs(tile))


def test_the_area_of_a_million_tokens_takes_no_loop() -> None:
    n = 1 << 20
    assert Tile(Span(0, n), Span(0, n), hi=0).area == n * (n + 1) // 2


def test_the_area_in_some_rows_counts_their_pairs() -> None:
    for tile, rng in tiles(9):
        rows = random_span(rng)
        assert tile.area_in(rows) == len([i for i, _ in pairs(tile) if rows.lo <= i < rows.hi])


def test_restricting_keeps_the_pairs_inside() -> None:
    for tile, rng in tiles(4):
        q, kv = random_span(rng), random_span(rng)
        inside = {(i, j) for i, j in pairs(tile) if q.lo <= i < q.hi and kv.lo <= j < kv.hi}
        assert pairs(tile.restrict(q, kv)) == inside


def test_the_common_part_of_two_tiles_is_the_common_pairs() -> None:
    for tile, rng in tiles(5):
        other = random_tile(rng)
        assert pairs(tile & other) == pairs(tile) & pairs(other)


def test_a_shrunk_tile_holds_another_if_it_has_its_pairs() -> None:
    for tile, rng in tiles(8, 20000):
        one, other = tile.shrink(), random_tile(rng).shrink()
        if one and other:
            assert one.holds(other) == (pairs(other) <= pairs(one))


def test_shifting_moves_every_pair() -> None:
    for tile, rng in tiles(6):
        q, kv = rng.randint(-3, 9), rng.randint(-3, 9)
        assert pairs(tile.shift(q, kv)) == {(i + q, j + kv) for i, j in pairs(tile)}


def test_the_band_is_the_window_of_a_kernel_call_over_the_rows_and_columns() -> None:
    for tile, _ in tiles(7):
        small = tile.shrink()
        if small is None:
            continue
        band, rows, columns = small.band, len(small.q), len(small.kv)
        seen = set()
        for i in range(rows):
            for j in range(columns):
                diagonal = j - i - (columns - rows)
                if (band.left < 0 or diagonal >= -band.left) and (band.right < 0 or diagonal <= band.right):
                    seen.add((i + small.q.lo, j + small.kv.lo))
        assert seen == pairs(small)


def test_the_usual_bands_have_names() -> None:
    square = Span(0, 4)
    assert Tile(square, square, hi=0).band == CAUSAL
    assert Tile(square, square).band == FULL
    assert FULL.is_full
    assert not CAUSAL.is_full
    assert Tile(Span(4, 8), Span(2, 8), -2, 0).band == Band(2, 0)


def test_records_are_frozen_and_have_their_defaults() -> None:
    assert Tile(Span(0, 4), Span(2, 6), hi=3) == Tile(Span(0, 4), Span(2, 6), -UNBOUNDED, 3)
    with pytest.raises(FrozenInstanceError):
        Span(0, 4).lo = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'hi'"):
        Span(0)  # type: ignore[call-arg]


@pytest.mark.parametrize("seed", range(3))
def test_spans_cover_what_they_hold_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1000):
        spans, whole = [random_span(rng) for _ in range(rng.randint(0, 4))], random_span(rng)
        held = {i for span in spans for i in range(span.lo, span.hi)}
        assert covers(spans, whole) == (set(range(whole.lo, whole.hi)) <= held)
