"""Packs of documents: the pieces of a step become one kernel call of several segments, and no others."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from dfa_megatron.plan.check import check
from dfa_megatron.plan.geometry import CAUSAL, FULL, Segment, Span, Tile
from dfa_megatron.plan.lower import lower_all
from dfa_megatron.plan.mask import causal, documents
from dfa_megatron.plan.pack import GAP, packs, segments_of
from dfa_megatron.plan.schedules import plan_named


def square(lo: int, hi: int) -> Tile:
    return Tile(Span(lo, hi), Span(lo, hi), hi=0)


def test_documents_of_one_rank_are_one_call() -> None:
    plan = plan_named("ring", documents([3, 1, 4, 8]), 2)
    (own, *_), _ = (program.steps for program in lower_all(plan.forward))
    (call,) = own.calls
    assert call.segments == (Segment(0, 3, 0, 3, CAUSAL), Segment(3, 4, 3, 4, FULL), Segment(4, 8, 4, 8, CAUSAL))
    assert call.area == 6 + 1 + 10


@pytest.mark.parametrize("schedule", ["ring", "balanced", "balanced_shared", "zigzag"])
def test_one_document_is_one_segment_that_is_the_whole_call(schedule: str) -> None:
    plan = plan_named(schedule, causal(48), 4)
    for phase in (plan.forward, plan.backward):
        for program in lower_all(phase):
            for call in (call for step in program.steps for call in step.calls):
                (segment,) = call.segments
                assert (segment.q_lo, segment.kv_lo) == (0, 0)
                assert (segment.q_hi, segment.kv_hi) == (call.q.rows, call.kv.rows)


def test_rows_between_segments_belong_to_none() -> None:
    q, kv, segments = segments_of([(square(2, 4), ()), (square(7, 9), ())])
    assert (q, kv) == (Span(2, 9), Span(2, 9))
    assert segments == (Segment(0, 2, 0, 2, CAUSAL), Segment(5, 7, 5, 7, CAUSAL))
    assert [segment.tile.shift(q.lo, kv.lo) for segment in segments] == [square(2, 4), square(7, 9)]


def test_pieces_that_share_rows_or_cross_are_calls_of_their_own() -> None:
    shared = Tile(Span(0, 4), Span(0, 2)), Tile(Span(4, 8), Span(0, 2))
    crossing = Tile(Span(0, 4), Span(4, 8)), Tile(Span(4, 8), Span(0, 4))
    for pair in (shared, crossing):
        assert len(packs([(tile, ()) for tile in pair])) == 2


def test_a_wide_gap_is_not_spanned() -> None:
    near, far = square(10 + GAP, 20 + GAP), square(11 + GAP, 21 + GAP)
    assert len(packs([(square(0, 10), ()), (near, ())])) == 1
    assert len(packs([(square(0, 10), ()), (far, ())])) == 2


@pytest.mark.parametrize("seed", range(6))
def test_random_packs_need_few_calls_and_are_right(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 6)
    lengths = [draw.randint(1, 12) for _ in range(40)]
    lengths.append(-sum(lengths) % (2 * ranks) or 2 * ranks)
    mask = documents(lengths, causal=draw.random() < 0.5)
    assert sum(lengths) == list(accumulate(lengths))[-1]
    for schedule in ("ring", "greedy", "zigzag"):
        for phase in (plan_named(schedule, mask, ranks).forward, plan_named(schedule, mask, ranks).backward):
            calls = [len(step.calls) for program in check(phase) for step in program.steps]
            assert max(calls) <= 4
