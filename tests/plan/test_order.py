"""The order of a reduce: chunks that depend on a document alone, a tree, and faults that the checker finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dfa_megatron.errors import PlanError, UnsupportedError
from dfa_megatron.plan.language.ir import Plan, loads
from dfa_megatron.plan.language.layout import contiguous, cross, cut_at, of_lengths
from dfa_megatron.plan.language.leaves import LeafSizes, grid_of, is_node, subtrees
from dfa_megatron.plan.language.mask import causal, cross_documents, documents, full, sliding_window
from dfa_megatron.plan.language.program import BufferMerges, Program, Region
from dfa_megatron.plan.lowering.landings import landings_of
from dfa_megatron.plan.lowering.lower import LeafRows, Write, lower, merges_of
from dfa_megatron.plan.proof.check import check_plan, check_programs
from dfa_megatron.plan.schedules.invariant import invariant_plan

SIZES = LeafSizes(least=4, usual=8)


def test_a_documents_chunks_are_the_same_in_any_pack() -> None:
    alone = grid_of(causal(37), SIZES)
    assert [len(chunk) for chunk in alone.chunks] == [4] * 8 + [5], "a short end belongs to the chunk before it"
    assert [len(chunk) for chunk in grid_of(causal(38), SIZES).chunks] == [4] * 9 + [2]
    assert alone.numbers == (*range(9),)
    packed = grid_of(documents([3, 37, 11, 37]), SIZES)
    for first in (3, 51):
        at = packed.at(first)
        assert [chunk.shift(-first) for chunk in packed.chunks[at : at + 9]] == [*alone.chunks]
        assert packed.numbers[at : at + 9] == alone.numbers


def test_chunks_grow_with_the_document_and_are_powers_of_two() -> None:
    sizes = LeafSizes(least=2048, usual=8192)
    tokens = (100, 8192, 16384, 32768, 65536, 100_000, 131_072, 1 << 20)
    assert [sizes.of(n) for n in tokens] == [2048, 2048, 2048, 4096, 8192, 8192, 8192, 65536]


def test_queries_and_keys_of_two_sequences_are_cut_apart_and_padding_is_no_document() -> None:
    grid = grid_of(cross_documents([10, 3], [5, 9]), SIZES)
    assert [(chunk.lo, chunk.hi) for chunk in grid.chunks] == [
        *((0, 4), (4, 8), (8, 10), (10, 13)), *((13, 18), (18, 22), (22, 27)),
    ]  # fmt: skip
    padded = grid_of(documents([5, 6], room=[9, 8]), SIZES)
    assert [(chunk.lo, chunk.hi) for chunk in padded.chunks] == [(0, 5), (5, 9), (9, 13), (13, 15), (15, 17)]


def test_subtrees_are_the_largest_nodes_among_the_leaves_that_there_are() -> None:
    assert subtrees((1, 2, 3), (0, 1, 2, 3)) == [(1,), (2, 3)]
    assert subtrees((1, 2, 3), (1, 2, 3)) == [(1, 2, 3)]
    assert subtrees((4, 6), (0, 4, 6, 7)) == [(4,), (6,)]
    assert subtrees((), (0, 1)) == []
    assert is_node((0,), (1,), (0, 1, 2))
    assert not is_node((1,), (0,), (0, 1, 2)), "the wrong way round"
    assert not is_node((1,), (2,), (0, 1, 2)), "no siblings"
    assert not is_node((0,), (2,), (0, 1, 2)), "1 is missing"
    assert is_node((0,), (2,), (0, 2, 4)), "nothing is seen between"


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_any_ranks_are_proved(seed: int) -> None:
    dice = random.Random(seed)
    tokens, ranks = dice.randint(1, 90), dice.randint(1, 9)
    cuts = sorted(dice.choices(range(tokens + 1), k=ranks - 1))
    held = of_lengths([b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)])
    for mask in (causal(tokens), full(tokens), sliding_window(tokens, 9), documents([tokens, 5, 40])):
        layout = held if mask.length == tokens else contiguous(mask.length, ranks)
        check_plan(invariant_plan(mask, layout, SIZES))
    two = cross_documents([tokens, 7], [tokens + 30, 9], causal=True)
    layout = cross(contiguous(tokens + 7, ranks), contiguous(tokens + 39, ranks))
    check_plan(invariant_plan(two, layout, SIZES))


def test_the_most_loaded_rank_has_little_above_the_mean() -> None:
    """Of a causal sequence, and of a pack whose heavy documents lie on the first rank alone."""
    for ranks in (2, 4, 8):
        uneven = documents([16] * 8 + [1] * (128 * (ranks - 1)))
        for mask, most in ((causal(128 * ranks), 1.1), (uneven, 1.3)):
            plan = invariant_plan(mask, contiguous(mask.length, ranks), LeafSizes(8, 32)).forward
            work = loads(plan.blocks, mask, plan.layout)
            assert max(work) <= most * sum(work) / ranks


def test_schedules_that_keep_no_order_are_refused_and_what_is_advised_works() -> None:
    for schedule in ("ring", "greedy"):
        with pytest.raises(UnsupportedError, match=r"numerics='invariant'.*balanced_shared"):
            invariant_plan(causal(64), contiguous(64, 2), SIZES, schedule)
    for schedule in ("auto", "balanced", "balanced_shared"):
        check_plan(invariant_plan(causal(64), contiguous(64, 2), SIZES, schedule))


# Faults, each of which gives right numbers with other bits.


def _plan(ranks: int = 3) -> Plan:
    return invariant_plan(causal(40), contiguous(40, ranks), SIZES).forward


def _changed(program: Program, change: Callable[[BufferMerges], BufferMerges]) -> Program:
    """The program with other merges of its own result."""
    own = program.home_buffer(program.phase.write_names[0])
    merges = program.buffers[own].merges
    assert merges is not None
    buffers = list(program.buffers)
    buffers[own] = buffers[own]._replace(merges=change(merges))
    return replace(program, buffers=tuple(buffers))


def _swapped(merges: BufferMerges) -> BufferMerges:
    """The two parts of every merge the other way round."""
    writes = tuple(
        replace(write, rows=tuple(replace(rows, first=tuple(not first for first in rows.first)) for rows in write.rows))
        for write in merges.writes
    )
    return replace(merges, writes=writes)


def test_a_merge_out_of_order_is_found() -> None:
    landings = landings_of(_plan())
    programs = [lower(one) for one in landings]
    check_programs(landings, programs)
    with pytest.raises(PlanError, match="no two halves of a node"):
        check_programs(landings, [_changed(programs[-1], _swapped)])


def test_a_sum_in_the_order_of_arrival_is_found() -> None:
    landings = landings_of(_plan())
    program = lower(landings[-1])
    own, rows = program.home_buffer("out"), landings[-1].plan.layout.tokens(landings[-1].rank)
    writes = [Write(region, True) for step in program.steps for call in step.calls for region in call.writes]
    writes += [Write(merge.write, False) for step in program.steps for merge in step.merges]
    arrived = merges_of(rows, [write for write in writes if write.region.buffer == own])
    with pytest.raises(PlanError, match=r"where two make a node|no two halves of a node"):
        check_programs(landings, [_changed(program, lambda _: arrived)])


def test_a_leaf_that_a_ranks_end_cuts_is_found() -> None:
    plan = _plan()
    cut = cut_at(plan.layout, [13])
    with pytest.raises(PlanError, match="a leaf is cut"):
        check_plan(replace(plan, layout=cut))


def test_leaves_that_are_fused_are_found() -> None:
    plan = _plan(1)
    landings = landings_of(plan)
    fused = landings_of(replace(plan, leaves=None))
    with pytest.raises(PlanError, match="no whole leaf"):
        check_programs(landings, [lower(fused[0])])


def test_a_partial_that_is_no_subtree_is_found() -> None:
    def write(*keys: int) -> Write:
        return Write(Region(0, "out", 0, 4), True, [LeafRows(0, 4, key) for key in keys])

    merges_of(4, [write(2, 3), write(0), write(1)], ordered=True)
    with pytest.raises(PlanError, match="no node of the tree"):
        merges_of(4, [write(1, 2), write(0), write(3)], ordered=True)
