"""Own keys that wait for landed ones: one call reads the rows of a document that reaches over ranks."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from dfa_megatron.plan.language.layout import contiguous
from dfa_megatron.plan.language.mask import Mask, causal, documents
from dfa_megatron.plan.language.program import Call, rows_read
from dfa_megatron.plan.language.tree import prompt_tree
from dfa_megatron.plan.lowering.landings import landings_of
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.plan.proof.check import check_plan
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan.schedules.assignments import ordered


def calls(mask: Mask, ranks: int, schedule: str = "balanced", repeats: int = 0) -> list[list[Call]]:
    """The calls of each rank, in both phases, after the proof of the plan."""
    check_plan(plan := SCHEDULES[schedule].plan(mask, ranks))
    programs = [lower(landings, repeats=repeats) for phase in plan.phases for landings in landings_of(phase)]
    return [[call for step in program.steps for call in step.calls] for program in programs]


def test_a_document_over_two_ranks_is_read_once() -> None:
    mask = documents([3000, 2000, 1500, 700, 1200, 7984])
    for its in calls(mask, 2):
        assert sum(rows_read(call.segments) for call in its) == 8192
    joint = [call for its in calls(mask, 2) for call in its if len(call.kv) > 1]
    assert [call.q.rows for call in joint] == [208, 208]
    assert all(len(call.writes) == len(call.kv) + 1 for call in joint[1:]), "gradients of landed and of own keys"


def test_answers_of_a_prompt_on_another_rank_are_read_once() -> None:
    mask = prompt_tree([300, *[500] * 16], [-1, *[0] * 16])
    *_, last = calls(mask, 2, repeats=4)
    assert sum(rows_read(call.segments) for call in last) == mask.length // 2
    assert {len(call.kv) for call in last} == {2}


def test_long_documents_and_single_sequences_keep_their_order() -> None:
    for mask in (causal(1 << 16), documents([1 << 16, 1 << 16])):
        for its in calls(mask, 4):
            assert all(len(call.kv) == 1 for call in its)


@pytest.mark.parametrize("seed", range(6))
def test_only_steps_of_own_keys_change_and_never_to_earlier_ones(seed: int) -> None:
    drawn = random.Random(seed)
    ranks, tokens = drawn.randint(2, 7), drawn.choice((2048, 16384))
    ends = sorted(drawn.sample(range(1, ranks * tokens), 5 * ranks))
    mask = documents([hi - lo for lo, hi in pairwise([0, *ends, ranks * tokens])], causal=drawn.random() < 0.7)
    layout = contiguous(mask.length, ranks)
    before = SCHEDULES["ring"].assign(mask, layout)
    after = ordered(before, mask, layout)
    assert [*after] == sorted(after)
    its = {block[1:]: block for block in after}
    pairs = [(old, its.pop(old[1:])) for old in before]
    assert its == {}
    for old, new in pairs:
        own = layout.owner[old.kv_chunk] == old.rank == layout.owner[old.q_chunk]
        assert new.step == old.step or (own and new.step > old.step)
    moved = {(new.rank, new.q_chunk) for old, new in pairs if old != new}
    reads = {(b.rank, b.q_chunk, b.step) for b in after if layout.owner[b.kv_chunk] != b.rank}
    assert all((b.rank, b.q_chunk, b.step) in reads for b in after if (b.rank, b.q_chunk) in moved and b not in before)


def test_answers_send_for_the_prompt_and_the_answer_before_alone() -> None:
    plan = SCHEDULES["balanced"].plan(prompt_tree([218, *[509] * 63, 483], [-1, *[0] * 64]), 2).forward
    sent = [len(plan.layout.chunks[transfer.chunk]) for transfer in plan.transfers if transfer.what == "kv"]
    assert 218 < sum(sent) < 218 + 509


def test_rows_that_stay_on_both_sides_of_others_keep_these() -> None:
    """Three calls would take longer than two that read some rows twice."""
    mask = documents([1012, 60, 208, 4096, 300, 272, 68, 336, 4096, 4096, 328, 164, 1348])
    for its in calls(mask, 2, "greedy", repeats=8):
        assert len(its) == 2
        assert all(len(call.kv) == 1 for call in its)
