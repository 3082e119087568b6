"""Masks with an independent definition of each: a predicate of (query, key), for comparison with their tiles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan import mask as masks
from dfa_megatron.plan.ir import Plan
from dfa_megatron.plan.mask import Mask
from dfa_megatron.plan.schedules import SCHEDULES, plan_named


@dataclass(frozen=True)
class Case:
    """A mask and what it should mean."""

    mask: Mask
    sees: Callable[[int, int], bool]

    @property
    def dense(self) -> np.ndarray:
        """(length, length) of bool."""
        everything = range(self.mask.length)
        return np.array([[self.sees(i, j) for j in everything] for i in everything], dtype=bool)


def of_documents(lengths: Sequence[int], causal: bool) -> Case:
    edges = list(accumulate(lengths))
    number = [next(d for d, edge in enumerate(edges) if i < edge) for i in range(sum(lengths))]
    return Case(masks.documents(lengths, causal=causal), lambda i, j: number[i] == number[j] and (j <= i or not causal))


def some_lengths(total: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), min(total - 1, rng.randint(1, 4)))) if total > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


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


def plans(case: Case, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Both phases of every schedule that supports the mask."""
    for name in SCHEDULES:
        try:
            plan = plan_named(name, case.mask, ranks)
        except UnsupportedError:
            continue
        yield name, plan.forward
        yield name, plan.backward
