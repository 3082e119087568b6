"""Packs of documents: the tiles of a step become one kernel call of several segments, and no others."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from dfa_megatron.errors import PlanError
from dfa_megatron.kernels import uncut
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Segment, Span, Tile
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, Phase, Plan
from dfa_megatron.plan.language.layout import contiguous
from dfa_megatron.plan.language.mask import block_causal_documents, documents
from dfa_megatron.plan.language.tree import prompt_tree
from dfa_megatron.plan.language.work import FAR
from dfa_megatron.plan.lowering import kernel_calls
from dfa_megatron.plan.lowering.kernel_calls import ANY, Planned, Takes, launches, packs
from dfa_megatron.plan.lowering.landings import landings_of
from dfa_megatron.plan.lowering.lower import lower, lower_all
from dfa_megatron.plan.lowering.messages import rank_messages
from dfa_megatron.plan.proof.check import check, check_programs
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan.schedules.assignments import by_memory, direct
from tests.support import arrays
from tests.support import plan_dense as dense
from tests.support.plan_cases import every_mask, heterogeneous_masks, plan_of


def copying(repeats: int) -> Takes:
    """A kernel of windows with so many query heads to a kv head; 0 for one that copies no keys."""
    return Takes("window", uncut, repeats=repeats)


def segments_in(call: Planned) -> list[Segment]:
    tiles = (tile for launch in call.launches for tile in launch.tiles())
    return sorted(Segment(t.q.lo, t.q.hi, t.kv.lo, t.kv.hi, t.band) for t in tiles)


def square(lo: int, hi: int) -> Tile:
    return Tile(Span(lo, hi), Span(lo, hi), hi=0)


def test_documents_of_one_rank_are_one_call() -> None:
    plan = plan_of("ring", documents([3, 1, 4, 8]), 2)
    (own, *_), _ = (program.steps for program in lower_all(plan.forward))
    (call,) = own.calls
    assert call.segments == (Segment(0, 3, 0, 3, CAUSAL), Segment(3, 4, 3, 4, FULL), Segment(4, 8, 4, 8, CAUSAL))


def test_rows_between_segments_belong_to_none() -> None:
    tiles = square(2, 4), square(7, 9)
    (call,) = launches(ANY, tiles)
    assert (call.q, call.kv, call.tiles) == (Span(2, 9), Span(2, 9), tiles)
    assert call.launches[0].segments == (Segment(0, 2, 0, 2, CAUSAL), Segment(5, 7, 5, 7, CAUSAL))
    assert [tile.shift(call.q.lo, call.kv.lo) for tile in call.launches[0].tiles()] == [*tiles]


@pytest.mark.parametrize(
    ("tiles", "calls"),
    [
        pytest.param([Tile(Span(0, 4), Span(0, 2)), Tile(Span(4, 8), Span(0, 2))], 2, id="shared rows"),
        pytest.param([Tile(Span(0, 4), Span(4, 8)), Tile(Span(4, 8), Span(0, 4))], 2, id="crossing"),
        pytest.param([square(0, 10), square(10 + FAR, 20 + FAR)], 1, id="a gap"),
        pytest.param([square(0, 10), square(11 + FAR, 21 + FAR)], 2, id="a wide gap"),
    ],
)
def test_pieces_are_calls_of_their_own_where_they_share_rows_or_cross_or_gaps_are_wide(
    tiles: list[Tile], calls: int
) -> None:
    """Gaps between many rows are calls, and gaps between few are copies."""
    assert len(packs([[tile] for tile in tiles])) == calls


@pytest.mark.parametrize("seed", range(6))
def test_random_packs_need_few_calls_and_are_right(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 6)
    lengths = [draw.randint(1, 12) for _ in range(40)]
    lengths.append(-sum(lengths) % (2 * ranks) or 2 * ranks)
    mask = documents(lengths, causal=draw.random() < 0.5)
    for schedule in ("ring", "greedy", "zigzag"):
        for phase in (plan_of(schedule, mask, ranks).forward, plan_of(schedule, mask, ranks).backward):
            calls = [len(step.calls) for program in check(phase) for step in program.steps]
            assert max(calls) <= 4


def in_one_step(phase: Phase) -> Plan:
    """A document over four ranks and a short one; every rank fetches all that it needs of the others at once."""
    mask, layout = documents([30, 2]), contiguous(32, 4)
    blocks = by_memory(mask, layout)
    return Plan(mask, layout, phase, blocks, direct(blocks, layout, phase))


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_parts_of_a_document_from_several_ranks_are_one_segment_of_one_call(phase: Phase) -> None:
    programs = check(in_one_step(phase))
    own, remote = (call for step in programs[2].steps for call in step.calls)
    assert own.segments == (Segment(0, 8, 0, 8, CAUSAL),)
    assert remote.segments == (Segment(0, 8, 0, 16, FULL),)
    (receives,) = (step.receives for step in programs[2].steps if any(m.peer == 0 for m in step.receives))
    landed = {message.peer: message.parts for message in receives}
    assert [(part.lo, part.hi) for peer in (0, 1) for (part,) in landed[peer] if part.name == "kv"] == [(0, 8), (8, 16)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["load_balanced", "greedy", "zigzag"])
def test_what_lands_in_a_step_lies_in_one_buffer_in_the_order_of_the_sequence(schedule: str, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 9, 17, 40]) for _ in range(12)]
    lengths.append(-sum(lengths) % 8 or 8)
    plan = plan_of(schedule, documents(lengths), 4)
    for phase in (plan.forward, plan.backward):
        for program, share in zip(lower_all(phase), rank_messages(phase, 1), strict=True):
            for number, step in enumerate(program.steps):
                parts = [
                    (region, phase.layout.chunks[chunks[0]].lo)
                    for message in step.receives
                    for (region,), (_, chunks) in zip(message.parts, share.incoming[number][message.peer], strict=True)
                    if region.name == "kv"
                ]
                assert len({region.buffer for region, _ in parts}) <= 1
                by_row = sorted(parts, key=lambda part: part[0].lo)
                assert by_row == sorted(parts, key=lambda part: part[1])
                assert [region.lo for region, _ in by_row] == [0, *(region.hi for region, _ in by_row)][: len(parts)]


def test_messages_that_land_on_one_another_are_refused() -> None:
    plan = in_one_step(FORWARD)
    programs = lower_all(plan)
    steps = list(programs[2].steps)
    at = next(number for number, step in enumerate(steps) if len(step.receives) == 2)
    first, second = steps[at].receives
    ((region,),) = second.parts
    moved = replace(second, parts=((region._replace(lo=region.lo - 1, hi=region.hi - 1),),))
    steps[at] = replace(steps[at], receives=(first, moved))
    programs[2] = replace(programs[2], steps=tuple(steps))
    with pytest.raises(PlanError, match="no place for a message to land in"):
        check_programs(landings_of(plan), programs)


@pytest.mark.parametrize("schedule", ["ring", "greedy"])
def test_what_lands_for_several_sequences_fills_its_tensor_and_is_proved(schedule: str) -> None:
    every = (*every_mask(32, random.Random(1)), *heterogeneous_masks(32, random.Random(2)))
    for case in random.Random(schedule).sample(every, 14):
        plan = plan_of(schedule, case.mask, 4)
        for phase in (plan.forward, plan.backward):
            reference = dense.reference(case.dense, seed=3)
            programs = check(phase, batch=2)
            assert arrays.is_right(phase, programs, reference, "random")
            for program in programs:
                for message in (message for step in program.steps for message in step.receives):
                    for (region,) in message.parts:
                        assert (0, region.hi) == (region.lo, dict(program.buffers[region.buffer].parts)[region.name])


def test_keys_may_be_used_again_where_that_saves_launches() -> None:
    """Blocks of video see the blocks before them: one call, where each had its own."""
    blocks = block_causal_documents([3000, 2000], 1000).tiles
    assert len(launches(copying(0), blocks)) == 3
    (one,) = launches(copying(4), blocks)
    assert [segment.tile for segment in segments_in(one)] == [*blocks]
    long = tuple(Tile(Span(lo, lo + 1000), Span(0, lo + 1000)) for lo in range(0, 9000, 1000))
    calls = [segments_in(call) for call in launches(copying(4), long)]
    assert 2 < len(calls) < 9  # of the blocks that see many, each has a call: their copies would take much memory
    assert all(sum(s.kv_hi - s.kv_lo for s in x) <= 3 * sum(s.q_hi - s.q_lo for s in x) for x in calls if len(x) > 1)


def test_a_prompt_is_joined_to_its_answers_where_copies_take_less_than_their_rows_again() -> None:
    """Two turns of two answers each behind a prompt: one launch, where prompt and turns had one each."""
    turns = [100, 1000, 400, 500, 1000, 400, 500], [-1, 0, 1, 1, 0, 4, 4]
    tiles = prompt_tree(*turns).tiles
    assert len(launches(copying(0), tiles)) == 3
    (one,) = launches(copying(4), tiles)
    last = [segment.tile for segment in segments_in(one) if segment.q_hi == 3900]
    assert [(tile.kv.lo, tile.kv.hi, tile.band) for tile in last] == [
        (0, 100, FULL), (2000, 3000, FULL), (3400, 3900, CAUSAL)
    ]  # fmt: skip
    long = prompt_tree([9000, 400, 400, 400], [-1, 0, 0, 0]).tiles
    assert len(launches(copying(4), long)) == 2


def test_tiles_that_would_become_a_band_stay_apart_for_a_kernel_without_bands() -> None:
    tiles = Tile(Span(8, 16), Span(0, 8)), Tile(Span(8, 16), Span(8, 16), hi=0)
    whole, *apart = (launches(Takes("segment", uncut, bands=bands), tiles) for bands in (True, False))
    assert [one.tiles for one in whole] == [(Tile(Span(8, 16), Span(0, 16), hi=0),)]
    assert [[one.tiles for one in found] for found in apart] == [[tiles[:1], tiles[1:]]]


@pytest.mark.parametrize("schedule", ["ring", "greedy"])
def test_programs_whose_calls_use_keys_again_are_proved_and_right(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_calls, "ROW", 1 << 40)
    monkeypatch.setattr(kernel_calls, "MOST_COPIES", 99)
    again = 0
    for case in (*every_mask(32, random.Random(3)), *heterogeneous_masks(32, random.Random(4))):
        plan = plan_of(schedule, case.mask, 3 if case.mask.length % 3 == 0 else 2)
        for phase in (plan.forward, plan.backward):
            landings = landings_of(phase)
            programs = [lower(one, copying(4)) for one in landings]
            check_programs(landings, programs)
            assert arrays.is_right(phase, programs, dense.reference(case.dense, seed=3), "random")
            again += sum(
                before.kv_hi > after.kv_lo
                for program in programs for step in program.steps for call in step.calls
                for before, after in pairwise(call.segments)
            )  # fmt: skip
    assert again > 20


def test_answers_send_for_the_prompt_and_the_answer_before_alone() -> None:
    plan = SCHEDULES["balanced"].plan(prompt_tree([218, *[509] * 63, 483], [-1, *[0] * 64]), 2).forward
    sent = [len(plan.layout.chunks[transfer.chunk]) for transfer in plan.transfers if transfer.what == "kv"]
    assert 218 < sum(sent) < 218 + 509
