"""Tiles against brute force: every operation on thousands of small random tiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import pytest

from dfa_megatron.plan.language.geometry import CAUSAL, FULL, UNBOUNDED, Span, Tile, covers

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


def test_the_area_of_a_million_tokens_takes_no_loop() -> None:
    n = 1 << 20
    assert Tile(Span(0, n), Span(0, n), hi=0).area == n * (n + 1) // 2


def test_operations_do_to_tiles_what_they_mean_for_pairs() -> None:
    for tile, rng in tiles(4):
        held, other, q, kv = pairs(tile), random_tile(rng), random_span(rng), random_span(rng)
        assert tile.area == len(held)
        assert tile.area_in(q) == len([i for i, _ in held if q.lo <= i < q.hi])
        assert pairs(tile.restrict(q, kv)) == {(i, j) for i, j in held if q.lo <= i < q.hi and kv.lo <= j < kv.hi}
        assert pairs(tile & other) == held & pairs(other)
        down, right = rng.randint(-3, 9), rng.randint(-3, 9)
        assert pairs(tile.shift(down, right)) == {(i + down, j + right) for i, j in held}


def test_a_shrunk_tile_holds_another_if_it_has_its_pairs() -> None:
    for tile, rng in tiles(8, 20000):
        one, other = tile.shrink(), random_tile(rng).shrink()
        if one and other:
            assert one.holds(other) == (pairs(other) <= pairs(one))


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


def test_records_are_frozen_and_have_their_defaults() -> None:
    assert Tile(Span(0, 4), Span(2, 6), hi=3) == Tile(Span(0, 4), Span(2, 6), -UNBOUNDED, 3)
    assert (Tile(Span(0, 4), Span(0, 4), hi=0).band, Tile(Span(0, 4), Span(0, 4)).band) == (CAUSAL, FULL)
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
