"""Masks against their definitions, pair by pair."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

from dfa_megatron import masks
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import needed_pairs
from dfa_megatron.plan.language.layout import contiguous
from dfa_megatron.plan.language.mask import Mask, of_window
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.sharding import tree_positions
from tests.support.plan_cases import ancestors, every_mask, heterogeneous_masks, of_union


def counts(mask: Mask) -> np.ndarray:
    """How many tiles hold each pair."""
    i, j = np.indices((mask.length, mask.length))
    total = np.zeros((mask.length, mask.length), dtype=int)
    for t in mask.tiles:
        inside = (t.q.lo <= i) & (i < t.q.hi) & (t.kv.lo <= j) & (j < t.kv.hi)
        total += inside & (t.lo <= j - i) & (j - i <= t.hi)
    return total


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("seed", range(2))
def test_the_tiles_of_a_mask_hold_each_of_its_pairs_once_and_no_other(length: int, seed: int) -> None:
    rng = random.Random(100 * seed + length)
    for case in [*every_mask(length, rng), *heterogeneous_masks(length, rng)]:
        assert (counts(case.mask) == case.dense).all(), case.mask.name
        assert case.mask.area == case.dense.sum()


@pytest.mark.parametrize("name", [name for name in masks.__all__ if name.islower() and name != "from_dense"])
def test_a_public_mask_is_compared_with_its_definition_and_documented(name: str) -> None:
    root = Path(__file__).parents[2]
    compared = "tests/support/plan_cases.py", "tests/plan/test_masks.py"
    assert any(f"masks.{name}(" in (root / path).read_text(encoding="utf-8") for path in compared)
    assert f"| `{name}(" in (root / "docs/masks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_two_sequences_hold_the_pairs_of_their_definition(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = [rng.randint(0, 6) for _ in range(3)] + [2], [rng.randint(0, 6) for _ in range(3)] + [3]
    causal, left = rng.random() < 0.5, rng.choice([-1, 0, 2])
    queries, keys = sum(rows), sum(columns)
    i, j = np.arange(queries)[:, None], np.arange(keys)

    def near(ahead: Any) -> Any:
        return (not causal or ahead <= 0) & (left < 0 or ahead >= -left) & np.ones((queries, keys), bool)

    def dense(mask: masks.Mask) -> Any:
        assert mask.queries == queries
        assert mask.length == queries + keys
        return counts(mask)[:queries, queries:]

    whole = masks.cross(queries, keys, causal=causal, window_size=(left, -1))
    assert np.array_equal(dense(whole), near(j - i - (keys - queries)))
    of_row, of_column = np.repeat(np.arange(4), rows)[:, None], np.repeat(np.arange(4), columns)
    ends = (np.cumsum(columns) - np.cumsum(rows))[of_row]
    pairs = masks.cross_documents(rows, columns, causal=causal, window_size=(left, -1))
    assert np.array_equal(dense(pairs), near(j - i - ends) & (of_row == of_column))
    tiles = [
        masks.Tile(masks.Span(0, queries), masks.Span(0, 1)),
        masks.Tile(masks.Span(1, 2), masks.Span(0, keys), hi=0),
    ]
    drawn = masks.two_sequences("two", queries, keys, tiles)
    assert np.array_equal(dense(drawn), (j < 1) | ((i == 1) & (j - i <= 0)))


@pytest.mark.parametrize("seed", range(4))
def test_a_dense_mask_becomes_the_tiles_of_the_same_pairs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    n = (1, 8, 17, 30)[seed]
    for case in [*every_mask(n, rng), *heterogeneous_masks(n, rng)]:
        monkeypatch.setattr(masks, "_CELLS", rng.choice([5 * n, 1 << 24]))
        dense = torch.from_numpy(case.dense)
        found = masks.from_dense(dense)
        assert np.array_equal(counts(found), case.dense), case.mask.name
        assert len(found.tiles) <= 2 * len(case.mask.tiles) ** 2
        assert masks.from_dense(lambda batch, head, i, j, dense=dense: dense[i, j], n) == found
    noise = np.random.default_rng(seed).random((n, n)) < 0.4
    assert np.array_equal(counts(masks.from_dense(noise)), noise)


def test_masks_of_flex_attention_become_tiles_or_name_the_first_cell_that_does_not_fit() -> None:
    document = torch.tensor([0] * 40 + [1] * 88)
    packed = and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: document[i] == document[j])
    blocks = create_block_mask(packed, None, None, 128, 128, device="cpu")
    assert masks.from_dense(blocks, 128, name="p").tiles == masks.documents([40, 88]).tiles
    lengths = torch.tensor([[128, 40], [100, 128]])
    for rows, heads in ((2, 1), (1, 2), (2, 2)):
        blocks = create_block_mask(lambda b, h, i, j: (i >= j) & (j < lengths[b, h]), rows, heads, 128, 128, "cpu")
        with pytest.raises(UnsupportedError, match=rf"a BlockMask of shape \({rows}, {heads}, 128, 128\)"):
            masks.from_dense(blocks, 128)
        for row in range(rows):
            found = masks.from_dense(lambda _, h, i, j, of=blocks, b=row: of.mask_mod(b, h, i, j), 128)
            assert found.area == sum(min(i + 1, int(lengths[row, 0])) for i in range(128))
    far = or_masks(packed, lambda b, h, i, j: (i * j) % 7 == 3)
    with pytest.raises(UnsupportedError, match=r"no union of 9 pieces: cell \(1, 52\) needs one more"):
        masks.from_dense(far, 128, most=9)
    for given in ((far,), (far, -1), (torch.zeros(0, 0, dtype=torch.bool),)):
        with pytest.raises(UnsupportedError, match="a mask without length"):
            masks.from_dense(*given)
    with pytest.raises(UnsupportedError, match="no matrix of bool"):
        masks.from_dense(torch.ones(8, 8))


def test_a_mask_restricted_to_a_part_holds_the_pairs_of_that_part() -> None:
    rng = random.Random(3)
    for case in every_mask(20, rng):
        q, kv = (Span(*sorted(rng.sample(range(21), 2))) for _ in range(2))
        part = Mask("part", 20, case.mask.restrict(q, kv))
        inside = np.zeros((20, 20), dtype=bool)
        inside[q.lo : q.hi, kv.lo : kv.hi] = True
        assert (counts(part) == (case.dense & inside)).all()


def test_a_tile_without_another_is_what_is_left_of_it() -> None:
    rng = random.Random(4)
    for _ in range(300):
        one, other = (of_union(9, rng).mask.tiles[0] for _ in range(2))
        left = Mask("left", 9, one - other)
        assert (counts(left) == counts(Mask("one", 9, (one,))) * (1 - counts(Mask("other", 9, (other,))))).all()


def test_most_masks_have_few_tiles_and_no_row_twice() -> None:
    """A kernel call per tile, and a merge for every row that two tiles hold."""
    lengths = [5, 1, 9, 17]
    for mask, tiles in (
        (masks.prefix_lm(32, 7), 2),
        (masks.prefix_lm_documents(lengths, 3), 7),
        (masks.causal_blockwise(lengths), 4),
        (masks.block_causal_documents(lengths, 4), 11),
        (masks.documents(lengths, causal=False, window_size=(2, 3)), 4),
    ):
        assert len(mask.tiles) == tiles
        rows = sorted((tile.q for tile in mask.tiles), key=lambda span: span.lo)
        assert all(one.hi <= other.lo for one, other in pairwise(rows)), mask.name


def test_a_long_document_with_many_blocks_takes_a_call_for_itself_and_one_for_all_blocks() -> None:
    """Their keys overlap where each row is in one tile: 34 images made 69 calls, and 870 merges of dk and dv."""
    images = [(at, at + 256) for at in range(100, 32768 - 256, 950)]
    blocks = [masks.block_causal_documents(*one) for one in (([32768], 512), ([32768], 1536), ([4096] * 8, 512))]
    for mask in (masks.two_way_blocks([32768], images), *blocks):
        for phase in make_plan(mask, 1).phases:
            (program,) = lower_all(phase)
            assert [len(step.calls) for step in program.steps] == [2], mask.name
    apart = [masks.block_causal_documents(*one) for one in (([32768], 8192), ([4096] * 8, 1024))]
    for mask in (masks.prefix_lm(32768, 256), *apart):
        assert all(one.q.hi <= other.q.lo for one, other in pairwise(sorted(mask.tiles))), mask.name


def test_a_tree_has_a_tile_for_each_leaf_and_each_branch() -> None:
    assert masks.prompt_tree([3, 2, 4], [-1, 0, 1]).tiles == masks.causal(9).tiles
    assert masks.prompt_tree([3, 2, 4], [-1, -1, -1]).tiles == masks.documents([3, 2, 4]).tiles
    lengths, parents = [3] + [2] * 6, [-1, 0, 1, 1, 1, 0, 5]  # a question, two answers, three and one further turns
    assert len(masks.prompt_tree(lengths, parents).tiles) == 4 + 2


def forests(segments: int) -> list[list[int]]:
    """The parents of every forest of that many segments in depth-first order."""
    found: list[list[int]] = [[]]
    for at in range(segments):
        found = [[*parents, parent] for parents in found for parent in {-1, *ancestors(at - 1, parents)} - {at}]
    return found


def test_every_small_tree_lets_a_token_see_its_ancestors_and_what_is_before_it() -> None:
    rng = random.Random(6)
    for parents in (parents for segments in range(1, 7) for parents in forests(segments)):
        lengths = [rng.randint(1, 3) for _ in parents]
        number = np.repeat(np.arange(len(lengths)), lengths)
        i, j = np.indices((len(number), len(number)))
        above = np.array([[b in ancestors(a, parents) for b in range(len(parents))] for a in range(len(parents))])
        place = np.array(tree_positions(lengths, parents).tolist())
        sees = (j <= i) & above[number[i], number[j]]
        for window in (-1, 0, rng.randint(1, 4), 18):
            near = (window < 0) | (place[i] - place[j] <= window)
            assert (counts(masks.prompt_tree(lengths, parents, window=window)) == (sees & near)).all(), parents


def test_masks_are_equal_if_their_tiles_are_whatever_their_names() -> None:
    """A mask is a key of caches."""
    rng = random.Random(7)
    for _ in range(50):
        one, other = (of_union(9, rng).mask for _ in range(2))
        same = Mask(one.name, one.length, tuple(one.tiles))
        assert one == same
        assert hash(one) == hash(same)
        assert (Mask(one.name, 9, other.tiles) == one) == (other.tiles == one.tiles)
        assert Mask(one.name, 9, one.tiles, balanced_by=masks.causal(9)) != one
    first, *rest = masks.documents([3, 6]).tiles
    assert Mask("mine", 9, (first, *rest)) != Mask("mine", 9, (first,))


def test_the_name_of_a_pack_tells_packs_apart_and_stays_short() -> None:
    many = [3 + d % 5 for d in range(500)]
    names = {masks.documents(lengths).name for lengths in (many, many[::-1], [*many[:-1], many[-1] + 1])}
    assert len(names) == 3
    assert max(map(len, names)) < 60
    assert masks.documents([3, 4]).name == "documents(causal;3,4)"
    assert masks.documents([3, 4], window_size=(9, 9)) == masks.documents([3, 4])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 0, 2, 9, 10, 30])
@pytest.mark.parametrize("right", [-1, 0, 2, 9, 10, 30])
def test_window_arguments_mean_what_flash_attention_means(causal: bool, left: int, right: int) -> None:
    n = 10
    last = 0 if causal else right
    want = [[(left < 0 or j >= i - left) and (last < 0 or j <= i + last) for j in range(n)] for i in range(n)]
    mask = of_window(n, causal, (left, right))
    assert (counts(mask) == np.array(want)).all()
    if np.array(want).all():
        assert mask == masks.full(n)
    if (np.array(want) == np.tri(n)).all():
        assert mask == masks.causal(n)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: masks.causal(0), "positive length, got 0"),
        (lambda: masks.sliding_window(4, -2), "at least 0"),
        (lambda: masks.documents([]), "must be positive"),
        (lambda: masks.documents([3, 0]), "must be positive"),
        (lambda: masks.prefix_lm(4, 5), "within the 4 tokens, got 5"),
        (lambda: masks.prefix_lm_documents([3, 4], [1]), "as many prefixes"),
        (lambda: masks.prefix_lm_documents([3, 4], -1), "at least 0 tokens"),
        (lambda: masks.prompt_tree([3, 0], [-1, 0]), "must be positive"),
        (lambda: masks.prompt_tree([3, 1], [-1]), "2 segments need as many parents"),
        (lambda: masks.prompt_tree([3], [0]), "the parent of segment 0 is -1, got 0"),
        (lambda: masks.prompt_tree([3, 1, 2], [-1, 0, 2]), "segment 2 is -1, 1 or an ancestor of 1, got 2"),
        (lambda: masks.prompt_tree([3, 1, 2, 1], [-1, 0, 0, 1]), "segment 3 is -1, 2 or an ancestor of 2, got 1"),
        (lambda: masks.prompt_tree([3, 1], [-1, -2]), "segment 1 is -1, 0 or an ancestor of 0, got -2"),
        (lambda: masks.block_causal_documents([3], 0), "positive length, got 0"),
        (lambda: masks.global_sliding(4, 1, 5), "5 global tokens"),
        (lambda: masks.global_sliding(4, -1, 1), "a window of -1"),
        (lambda: masks.documents([4], window_size=(-2, 0)), "at least 0"),
        (lambda: masks.union("u", 4, [Tile(Span(0, 5), Span(0, 1))]), "not within the 4 tokens"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused_with_the_value(make: Callable[[], Mask], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        make()


def test_what_follows_from_a_mask_is_kept_on_it_and_does_not_travel() -> None:
    mask, layout = masks.causal(24), contiguous(24, 3)
    assert needed_pairs(mask, layout.chunks) is needed_pairs(mask, contiguous(24, 3).chunks)
    travelled = pickle.loads(pickle.dumps(mask))  # noqa: S301 (our own)
    assert travelled == mask
    assert len(pickle.dumps(mask)) == len(pickle.dumps(masks.causal(24)))
    assert needed_pairs(travelled, layout.chunks) is not needed_pairs(mask, layout.chunks)
