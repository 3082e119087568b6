"""Masks with an independent definition of each: a predicate of (query, key), for comparison with their tiles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from unittest import mock

import numpy as np

from dfa_megatron import masks
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language import geometry
from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.ir import AttentionPlan, Plan
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.schedules import OWNER_COMPUTES, SCHEDULES, over_nodes
from dfa_megatron.sharding import tree_positions


@dataclass(frozen=True)
class Case:
    """A mask and what it should mean."""

    mask: Mask
    sees: Callable[[int, int], bool]

    @cached_property
    def dense(self) -> np.ndarray:
        """(length, length) of bool."""
        everything = range(self.mask.length)
        return np.array([[self.sees(i, j) for j in everything] for i in everything], dtype=bool)

    @property
    def sees_itself(self) -> bool:
        """Whether every token does."""
        return all(self.sees(i, i) for i in range(self.mask.length))


def of_documents(lengths: Sequence[int], causal: bool) -> Case:
    edges = list(accumulate(lengths))
    number = [next(d for d, edge in enumerate(edges) if i < edge) for i in range(sum(lengths))]
    return Case(masks.documents(lengths, causal=causal), lambda i, j: number[i] == number[j] and (j <= i or not causal))


def some_lengths(total: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), min(total - 1, rng.randint(1, 4)))) if total > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def some_parents(segments: int, rng: random.Random) -> list[int]:
    """The parents of segments in depth-first order; few are roots."""
    parents: list[int] = []
    for last in range(-1, segments - 1):
        above = ancestors(last, parents)
        parents.append(rng.choice([*above, *above, -1]))
    return parents


def ancestors(segment: int, parents: Sequence[int]) -> list[int]:
    """A segment, its parent, and so on up to its root; none of -1."""
    return [segment, *ancestors(parents[segment], parents)] if segment >= 0 else []


def every_mask(n: int, rng: random.Random) -> list[Case]:
    """Each kind of mask over n tokens, with its parameters drawn anew."""
    left, right, prefix = rng.randint(0, n), rng.randint(0, n // 2 + 1), rng.randint(0, n)
    narrow = rng.randint(0, 3)
    return [
        Case(masks.causal(n), lambda i, j: j <= i),
        Case(masks.full(n), lambda i, j: True),
        Case(masks.sliding_window(n, left), lambda i, j: i - left <= j <= i),
        Case(masks.sliding_window(n, narrow), lambda i, j: i - narrow <= j <= i),
        Case(masks.sliding_window(n, left, right), lambda i, j: i - left <= j <= i + right),
        Case(masks.sliding_window(n, -1, right), lambda i, j: j <= i + right),
        of_documents(some_lengths(n, rng), causal=True),
        of_documents(some_lengths(n, rng), causal=False),
        Case(masks.prefix_lm(n, prefix), lambda i, j: j < prefix or j <= i),
    ]


def heterogeneous_masks(n: int, rng: random.Random) -> list[Case]:
    """The masks that are neither a band nor documents, and documents with windows, over n tokens."""
    lengths, left, right = some_lengths(n, rng), rng.randint(0, 4), rng.randint(0, 4)
    edges = list(accumulate(lengths, initial=0))
    number = [d for d, length in enumerate(lengths) for _ in range(length)]
    start = [edges[d] for d in number]
    prefix, block, tokens = rng.randint(0, n), rng.randint(1, 5), rng.randint(0, n)
    prefixes = [rng.randint(0, 5) for _ in lengths]
    parents = some_parents(len(lengths), rng)
    place, reach = tree_positions(lengths, parents).tolist(), rng.choice([n, left])

    windows = partial(masks.documents, lengths, causal=False)

    def alike(i: int, j: int) -> bool:
        return number[i] == number[j]

    return [
        Case(windows(window_size=(left, right), causal=True), lambda i, j: alike(i, j) and i - left <= j <= i),
        Case(windows(window_size=(left, right)), lambda i, j: alike(i, j) and i - left <= j <= i + right),
        Case(windows(window_size=(-1, right)), lambda i, j: alike(i, j) and j <= i + right),
        Case(
            masks.prefix_lm_documents(lengths, prefix), lambda i, j: alike(i, j) and (j <= i or j - start[j] < prefix)
        ),
        Case(
            masks.prefix_lm_documents(lengths, prefixes),
            lambda i, j: alike(i, j) and (j <= i or j - start[j] < prefixes[number[j]]),
        ),
        Case(
            masks.prompt_tree(lengths, parents, window=reach),
            lambda i, j: j <= i and number[j] in ancestors(number[i], parents) and place[i] - place[j] <= reach,
        ),
        Case(masks.causal_blockwise(lengths), lambda i, j: j <= i and (alike(i, j) or number[i] == number[-1])),
        *of_blocks(lengths, block),
        Case(masks.global_sliding(n, left, tokens), lambda i, j: i < tokens or j < tokens or abs(i - j) <= left),
        Case(
            masks.global_sliding(n, left, tokens, causal=True),
            lambda i, j: j <= i and (i < tokens or j < tokens or i - j <= left),
        ),
        *of_images(lengths, left, rng),
        of_union(n, rng),
    ]


def of_blocks(lengths: Sequence[int], block: int) -> list[Case]:
    """Documents in blocks, as short ones and as long ones have their tiles."""
    starts = [lo for lo, length in zip(accumulate(lengths, initial=0), lengths, strict=False) for _ in range(length)]

    def sees(i: int, j: int) -> bool:
        return starts[i] == starts[j] and (j - starts[j]) // block <= (i - starts[i]) // block

    make = partial(masks.block_causal_documents, lengths, block)
    return [Case(make(), sees), Case(rows_twice(make), sees)]


def rows_twice(make: Callable[[], Mask]) -> Mask:
    """A mask whose rows of blocks are in two tiles each, as they are in long documents."""
    with mock.patch.multiple(geometry, FAR=0, ROW=-(1 << 40)):
        return make()


def of_images(lengths: Sequence[int], left: int, rng: random.Random) -> list[Case]:
    """Blocks inside of documents, some of them side by side, without a window and with one."""
    edges, blocks = list(accumulate(lengths, initial=0)), list[tuple[int, int]]()
    for lo, hi in pairwise(edges):
        cuts = sorted(rng.choices(range(lo, hi + 1), k=4))
        blocks += [(a, b) for a, b in pairwise(cuts) if a < b and rng.random() < 0.6]

    def sees(i: int, j: int) -> bool:
        alike = any(lo <= i < hi and lo <= j < hi for lo, hi in pairwise(edges))
        return alike and (j <= i or any(lo <= i < hi and lo <= j < hi for lo, hi in blocks))

    def near(i: int, j: int) -> bool:
        return sees(i, j) and i - left <= j

    make = partial(masks.two_way_blocks, lengths, blocks)
    windowed = partial(make, left)
    return [Case(make(), sees), Case(windowed(), near), Case(rows_twice(make), sees), Case(rows_twice(windowed), near)]


def of_union(n: int, rng: random.Random) -> Case:
    """Tiles that overlap at random, and their union."""

    def span() -> Span:
        return Span(*sorted(rng.choices(range(n + 1), k=2)))

    def bound(free: int) -> int:
        return rng.choice([free, free, rng.randint(-n, n)])

    tiles = [Tile(span(), span(), bound(-UNBOUNDED), bound(UNBOUNDED)) for _ in range(rng.randint(1, 6))]
    tiles.append(Tile(Span(0, 1), Span(0, 1)))

    def sees(i: int, j: int) -> bool:
        return any(t.q.lo <= i < t.q.hi and t.kv.lo <= j < t.kv.hi and t.lo <= j - i <= t.hi for t in tiles)

    return Case(masks.union("union", n, tiles), sees)


WAYS = (*SCHEDULES, *OWNER_COMPUTES)
"""The names of schedules, and of the layouts that have one of their own."""


def plan_of(way: str, mask: Mask, ranks: int, ranks_per_node: int | None = None) -> AttentionPlan:
    """The plan of a schedule, or of the layout of that name; over nodes but for the ring."""
    plan = (SCHEDULES | OWNER_COMPUTES)[way].plan(mask, ranks)
    return plan if ranks_per_node is None or way == "ring" else over_nodes(plan, ranks_per_node)


def attention_plans(
    case: Case, ranks: int, ranks_per_node: int | None = None, ways: Sequence[str] = WAYS
) -> Iterator[tuple[str, AttentionPlan]]:
    """The plan of every schedule that supports the mask."""
    for name in ways:
        try:
            plan = plan_of(name, case.mask, ranks, ranks_per_node)
        except UnsupportedError:
            continue
        yield name, plan


def plans(
    case: Case, ranks: int, ranks_per_node: int | None = None, ways: Sequence[str] = WAYS
) -> Iterator[tuple[str, Plan]]:
    """Both phases of each of them."""
    for name, plan in attention_plans(case, ranks, ranks_per_node, ways):
        yield from ((name, phase) for phase in plan.phases)
