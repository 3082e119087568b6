"""Lowered programs: few calls, one message per peer, bounded slots, and right numbers however messages travel."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dfa_megatron.errors import PlanError
from dfa_megatron.kernels import uncut
from dfa_megatron.plan.language.geometry import FULL, Band, Segment, Span
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.mask import causal, full
from dfa_megatron.plan.language.program import BufferMerges, Call, Destination, Launch, Program, Region, Step
from dfa_megatron.plan.lowering.kernel_calls import ANY, Takes
from dfa_megatron.plan.lowering.landings import Arenas, landings_of
from dfa_megatron.plan.lowering.lower import lower, lower_all
from dfa_megatron.plan.proof.check import check, check_plan, check_programs, prove_arena
from tests.support import arrays
from tests.support.plan_cases import every_mask, plan_of, plans
from tests.support.plan_dense import Reference, reference
from tests.support.workers import by_turns

ORDERS = ("eager", "lazy", "random")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_programs_are_right_however_early_or_late_messages_travel(ranks: int) -> None:
    rng = random.Random(ranks)
    for case in every_mask(2 * ranks * rng.randint(1, 2), rng):
        expected = reference(case.dense, seed=ranks)
        for name, plan in plans(case, ranks):
            programs = lower_all(plan)
            for program in programs:
                for messages in (each for step in program.steps for each in (step.sends, step.receives)):
                    peers = [message.peer for message in messages]
                    assert len({*peers, program.rank}) == len(peers) + 1, "one message to a peer in a step"
            for order in rng.sample(ORDERS, 2):
                right = arrays.is_right(plan, programs, expected, order, seed=ranks)
                assert right, f"{name} {plan.phase.name} of {case.mask.name}, messages {order}"


@pytest.mark.parametrize("schedule", ["balanced_shared", "balanced", "zigzag", "ring"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_a_rank_makes_one_kernel_call_per_step_on_a_causal_mask(schedule: str, ranks: int) -> None:
    attention = plan_of(schedule, causal(ranks * 12), ranks)
    for plan in (attention.forward, attention.backward):
        for program in lower_all(plan):
            assert all(len(step.calls) <= 1 for step in program.steps)


def test_every_rank_finds_its_own_wrong_results_and_together_they_find_all() -> None:
    plan = plan_of("balanced", causal(24), 3).backward
    programs = lower_all(plan)
    first, *rest = programs[1].steps
    (call,) = first.calls
    (launch,) = call.launches
    worse = replace(call, launches=(launch._replace(segments=(replace(launch.segments[0], band=Band(0, 0)),)),))
    programs[1] = replace(programs[1], steps=(replace(first, calls=(worse,)), *rest))
    check_programs(landings_of(plan), [programs[0], programs[2]])
    for some in (programs[1:2], programs):
        with pytest.raises(PlanError, match="does not hold each pair"):
            check_programs(landings_of(plan), some)


def test_query_rows_in_two_launches_are_refused() -> None:
    """The pairs are right, but a kernel writes the rows of a launch: the second one's results would be all."""
    plan = plan_of("ring", full(12), 2).forward
    programs = lower_all(plan)
    first, *rest = programs[0].steps
    (call,) = first.calls
    keys = Span(0, 4), Span(4, call.kv.rows)
    halves = tuple(Launch((Span(0, 6),), (kv,), (Segment(0, 6, 0, len(kv), FULL),)) for kv in keys)
    programs[0] = replace(programs[0], steps=(replace(first, calls=(replace(call, launches=halves),)), *rest))
    with pytest.raises(PlanError, match="are in two launches"):
        check_programs(landings_of(plan), programs)


SLOTS = {"balanced_shared": (4, 5), "balanced": (4, 5), "zigzag": (2, 5), "ring": (2, 5)}
"""The most slots a rank needs on a causal mask from P = 8 on, forward and backward, as docs/schedule-theory.md says."""


@pytest.mark.parametrize("schedule", SLOTS)
@pytest.mark.parametrize("ranks", [8, 9, 25])
def test_slots_do_not_grow_with_the_ranks(schedule: str, ranks: int) -> None:
    attention = plan_of(schedule, causal(ranks * 4), ranks)
    check(attention.forward, max_slots=SLOTS[schedule][0])
    check(attention.backward, max_slots=SLOTS[schedule][1])


def test_a_plan_over_its_bound_of_slots_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"needs \d+ slots .* the bound is 1"):
        check_plan(plan_of("balanced", causal(32), 8), max_slots=1)


# Mutants of programs.

Edit = Callable[[list[Program], random.Random], list[Program] | None]


def _put(records: Sequence[Any], at: int, *others: Any) -> tuple[Any, ...]:
    """Put others, or none, in the place of one."""
    return (*records[:at], *others, *records[at + 1 :])


def _with_step(programs: Sequence[Program], rank: int, number: int, step: Step) -> list[Program]:
    changed = replace(programs[rank], steps=_put(programs[rank].steps, number, step))
    return [changed if p.rank == rank else p for p in programs]


def _some_step(programs: Sequence[Program], rng: random.Random, field: str) -> tuple[int, int, Step] | None:
    places = [(p.rank, n, s) for p in programs for n, s in enumerate(p.steps) if getattr(s, field)]
    return rng.choice(places) if places else None


def _edit_one(
    programs: list[Program], rng: random.Random, field: str, edit: Callable[[Any], Any]
) -> list[Program] | None:
    """Change one record of one step's tuple; an edit that returns None leaves it out."""
    place = _some_step(programs, rng, field)
    if place is None:
        return None
    rank, number, step = place
    records = getattr(step, field)
    at = rng.randrange(len(records))
    other = edit(records[at])
    changed = _put(records, at) if other is None else _put(records, at, other)
    return _with_step(programs, rank, number, replace(step, **{field: changed}))


def _merges_otherwise(merges: BufferMerges, rng: random.Random) -> BufferMerges | None:
    """Change one thing of how an accumulator is filled."""
    if merges.empty and rng.random() < 0.2:
        return replace(merges, empty=merges.empty[1:])
    writes = merges.writes
    at = rng.randrange(len(writes)) if writes else 0
    if not writes or not writes[at].rows:
        return None
    rows = list(writes[at].rows)
    row = rng.randrange(len(rows))
    one, by = rows[row], rng.choice([-1, 1])
    kind = rng.choice(["drop", "into", "sum", "skip", "lo", "hi", "saved", "freed", "order"])
    if kind == "drop":
        del rows[row]
    elif kind == "order":
        rng.shuffle(rows)
    elif kind == "into":
        rows[row] = replace(one, into=rng.choice([into for into in Destination if into is not one.into]))
    elif kind == "saved":
        others = [other for other in range(len(writes)) if other not in one.saved]
        saved = one.saved[1:] if one.saved and rng.random() < 0.7 else (*one.saved, rng.choice(others or [0]))
        rows[row] = replace(one, saved=saved)
    elif kind == "freed":
        rows[row] = replace(one, freed=one.freed[1:] if one.freed else one.saved[:1])
    elif kind == "sum":
        rows[row] = replace(one, sum=not one.sum)
    else:
        rows[row] = replace(one, **{kind: getattr(one, kind) + by})
    return replace(merges, writes=_put(writes, at, replace(writes[at], rows=tuple(rows))))


def merge_otherwise(programs: list[Program], rng: random.Random) -> list[Program] | None:
    program = rng.choice(programs)
    at = rng.choice([number for number, buffer in enumerate(program.buffers) if buffer.merges is not None])
    merges = program.buffers[at].merges
    other = merges and _merges_otherwise(merges, rng)
    if other is None or other == merges:
        return None
    changed = replace(program, buffers=_put(program.buffers, at, program.buffers[at]._replace(merges=other)))
    return [changed if p is program else p for p in programs]


def wait_for_less(programs: list[Program], rng: random.Random) -> list[Program] | None:
    places = [(p.rank, n, s) for p in programs for n, s in enumerate(p.steps) if s.after >= 0]
    if not places:
        return None
    rank, number, step = rng.choice(places)
    return _with_step(programs, rank, number, replace(step, after=rng.randint(-1, step.after - 1)))


def alias_slots(programs: list[Program], rng: random.Random) -> list[Program] | None:
    program = rng.choice(programs)
    places = [number for number, buffer in enumerate(program.buffers) if buffer.slot is not None]
    if len(places) < 2:
        return None
    one, other = rng.sample(places, 2)
    aliased = program.buffers[one]._replace(slot=program.buffers[other].slot)
    changed = replace(program, buffers=_put(program.buffers, one, aliased))
    return [changed if p is program else p for p in programs]


def _shift(region: Region, rng: random.Random) -> Region:
    by = rng.choice([-1, 1])
    return region._replace(lo=region.lo + by, hi=region.hi + by)


def shift_region(programs: list[Program], rng: random.Random) -> list[Program] | None:
    def shift(record: Any) -> Any:
        if isinstance(record, Call):
            side = rng.choice(["q", "kv", "writes"])
            if side != "writes":
                return replace(record, **{side: _shift(getattr(record, side), rng)})
            at = rng.randrange(len(record.writes))
            return replace(record, writes=_put(record.writes, at, _shift(record.writes[at], rng)))
        end = rng.choice(["source", "write"])
        return replace(record, **{end: _shift(getattr(record, end), rng)})

    return _edit_one(programs, rng, rng.choice(["calls", "merges"]), shift)


def shift_message(programs: list[Program], rng: random.Random) -> list[Program] | None:
    def shift(message: Any) -> Any:
        (first, *regions), *parts = message.parts
        return replace(message, parts=((_shift(first, rng), *regions), *parts))

    return _edit_one(programs, rng, rng.choice(["sends", "receives"]), shift)


def _some_launch(call: Any, rng: random.Random) -> tuple[Launch, Callable[[Launch], Any]]:
    """A launch of a call, and what puts another one in its place."""
    at = rng.randrange(len(call.launches))

    return call.launches[at], lambda launch: replace(call, launches=_put(call.launches, at, launch))


def change_launches(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """One has another window, other rows or keys, or is left out or doubled."""

    def change(call: Any) -> Any:
        launch, put = _some_launch(call, rng)
        kind = rng.choice(["window", "q", "kv", "drop", "double"])
        if kind == "window":
            return put(launch._replace(window=rng.choice([None, Band(-1, -1), Band(-1, 0), Band(2, 0)])))
        if kind == "drop":
            return replace(call, launches=tuple(x for x in call.launches if x is not launch))
        if kind == "double":
            return replace(call, launches=(*call.launches, launch))
        spans = getattr(launch, kind)
        at, by = rng.randrange(len(spans)), rng.choice([-1, 1])
        ways = [spans[at].shift(by), Span(spans[at].lo + by, spans[at].hi), Span(spans[at].lo, spans[at].hi + by)]
        return put(launch._replace(**{kind: _put(spans, at, rng.choice(ways))}))

    return _edit_one(programs, rng, "calls", change)


def change_band(programs: list[Program], rng: random.Random) -> list[Program] | None:
    def change(call: Any) -> Any:
        launch, put = _some_launch(call, rng)
        at, segment = rng.choice(list(enumerate(launch.segments)))
        left, right = segment.band.left, segment.band.right
        bands = [Band(-1, -1), Band(-1, 0), Band(left, right + 1), Band(max(-1, left - 1), right), Band(left, 1)]
        other = replace(segment, band=rng.choice(bands))
        return put(launch._replace(segments=_put(launch.segments, at, other)))

    return _edit_one(programs, rng, "calls", change)


def change_segments(programs: list[Program], rng: random.Random) -> list[Program] | None:
    """One is left out, moved, stretched, doubled or swapped with another, or two are made one."""

    def change(call: Any) -> Any:
        launch, put = _some_launch(call, rng)
        segments = list(launch.segments)
        at = rng.randrange(len(segments))
        one, by = segments[at], rng.choice([-1, 1])
        edges = rng.choice([("q_lo",), ("q_hi",), ("kv_lo",), ("kv_hi",), ("q_lo", "q_hi"), ("kv_lo", "kv_hi")])
        kind = rng.choice(["drop", "move", "move", "double", "swap", "join"])
        if kind == "drop":
            del segments[at]
        elif kind == "move":
            segments[at] = replace(one, **{edge: getattr(one, edge) + by for edge in edges})
        elif kind == "double":
            segments.insert(at, one)
        elif kind == "swap":
            rng.shuffle(segments)
        elif at:
            segments[at - 1 : at + 1] = [replace(one, q_lo=segments[at - 1].q_lo, kv_lo=segments[at - 1].kv_lo)]
        return put(launch._replace(segments=tuple(segments)))

    return _edit_one(programs, rng, "calls", change)


def drop_record(programs: list[Program], rng: random.Random) -> list[Program] | None:
    return _edit_one(programs, rng, rng.choice(["calls", "merges", "sends", "receives"]), lambda record: None)


EDITS: tuple[Edit, ...] = (
    merge_otherwise,
    wait_for_less,
    alias_slots,
    shift_region,
    shift_message,
    change_band,
    change_segments,
    change_launches,
    drop_record,
)


@functools.lru_cache
def lowered(ranks: int) -> list[tuple[Reference, list[tuple[Plan, list[Program]]]]]:
    """Of each mask: dense attention, and the programs of every plan."""
    rng, out = random.Random(ranks), []
    for case in every_mask(2 * ranks * rng.randint(1, 2), rng):
        takes = Takes("window", uncut, skips=rng.random() < 0.5, repeats=rng.choice([0, 4]))
        programs = [
            (plan, [lower(one, rng.choice((ANY, takes))) for one in landings_of(plan)])
            for _, plan in plans(case, ranks)
        ]
        out.append((reference(case.dense, seed=ranks), programs))
    return out


@pytest.mark.parametrize("edit", EDITS)
def test_a_broken_program_is_refused_or_right_in_every_order(edit: Edit) -> None:
    rng = random.Random(edit.__name__)
    verdicts: Counter[bool] = Counter()
    for ranks in by_turns((2, 3, 4, 5)):
        for expected, candidates in lowered(ranks):
            for _ in range(12):
                plan, programs = rng.choice(candidates)
                mutant = edit(programs, rng)
                if mutant is None or mutant == programs:
                    continue
                try:
                    check_programs(landings_of(plan), mutant)
                except PlanError:
                    verdicts[False] += 1
                    continue
                verdicts[True] += 1
                for order in ORDERS:
                    right = arrays.is_right(plan, mutant, expected, order, seed=rng.randrange(100))
                    assert right, f"{plan.phase.name} of {plan.mask.name}, messages {order}"
    assert verdicts[False] > 20, verdicts


ROW_BYTES = {"q": (2,), "kv": (3, 5), "out": (4, 4), "qdo": (2, 2, 4, 4), "dq": (7,), "dkv": (3, 4)}


def move_a_place(arenas: Arenas, rank: int, rng: random.Random) -> bool:
    """Move one tensor of a rank's arena off its alignment or onto another one, or take bytes of the arena away."""
    starts = arenas.starts_on(rank)
    if not starts:
        return False
    if rng.random() < 0.3:
        arenas.nbytes = 1
        return True
    buffer = rng.choice(list(starts))
    name = rng.choice(list(starts[buffer]))
    first, *others = starts[buffer][name]
    near = [at for places in starts[buffer].values() for at in places if at != first]
    starts[buffer][name] = (rng.choice([first - 1, first + 1, *near]), *others)
    return True


def test_a_wrong_place_in_an_arena_is_refused() -> None:
    rng = random.Random(5)
    refused = 0
    for ranks in (2, 3, 4, 5):
        for case in every_mask(2 * ranks, rng):
            for _, plan in plans(case, ranks):
                program, arenas = rng.choice(lower_all(plan)), Arenas(landings_of(plan), ROW_BYTES)
                prove_arena(program, arenas)
                if move_a_place(arenas, program.rank, rng):
                    refused += 1
                    with pytest.raises(PlanError, match=r"overlap|fit in"):
                        prove_arena(program, arenas)
    assert refused > 50, refused
