"""A random case of distributed attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.layout import cross
from dfa_megatron.plan.language.mask import Mask, cross_documents, of_window, two_sequences, union
from dfa_megatron.plan.language.tree import prompt_tree
from dfa_megatron.rows import join_rows
from tests.fuzz.outcome import Draw
from tests.support import attend
from tests.support.packs import drawn_layout, random_offsets
from tests.support.plan_cases import ancestors, every_mask, heterogeneous_masks

LAYOUTS = {
    "contiguous": ("auto", "ring", "balanced", "balanced_shared", "greedy"),
    "zigzag": ("auto",),
    "load_balanced": ("auto",),
}
"""Layouts, and the schedules that work on them."""

DTYPES = ("float64", "float64", "float32", "bfloat16", "float16")
WINDOWS = ((-1, -1), (-1, -1), (-1, -1), (0, 0), (1, 1), (5, 0), (0, -1), (40, -1), (-1, 3), (6, 9))
CHECKPOINTS = ("none", "none", "full", "remat", "remat, not re-entrant", "remat on the host")
CPU_KERNELS = ("auto", "reference", "cpu")
GPU_KERNELS = ("auto", "flash4", "cudnn", "aten", "triton")
MOST_RANKS, MOST_PARTS = 9, 64


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """Hold shapes for which a GPU kernel is compiled, in seconds each; a run on a GPU draws from few."""

    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    softcap: float = 0.0
    deterministic: bool = False


GPU_CLASSES = (
    ShapeClass("bfloat16", 8, 2, 128, 128),
    ShapeClass("bfloat16", 4, 4, 128, 128),
    ShapeClass("bfloat16", 8, 1, 64, 64),
    ShapeClass("bfloat16", 6, 2, 96, 96),
    ShapeClass("bfloat16", 8, 2, 128, 128, deterministic=True),
    ShapeClass("bfloat16", 8, 2, 128, 128, softcap=20.0),
    ShapeClass("bfloat16", 4, 4, 192, 128),
    ShapeClass("bfloat16", 4, 2, 80, 80),
    ShapeClass("bfloat16", 2, 1, 256, 256),
    ShapeClass("float16", 8, 2, 128, 128),
    ShapeClass("float16", 4, 4, 64, 64),
    ShapeClass("float32", 4, 2, 64, 64),
)
"""The shapes of a run on a GPU, by the number of a case: as many jobs as shapes each compile for one of them alone."""


@dataclass(frozen=True, kw_only=True)
class Case(Draw):
    """One attention of all its ranks.

    over: "together" (all ranks in one process), or "gloo" or "nccl" (a process for each).
    options: keywords of the public functions beside those of `whole`. deterministic: as PyTorch is asked.
    checkpoint: one of CHECKPOINTS, around a call of the public functions. compiled: the call is under torch.compile.
    """

    over: str  # type: ignore[misc]
    count: int
    whole: attend.Case
    options: dict[str, Any]
    checkpoint: str
    compiled: bool
    deterministic: bool

    @property
    def ranks(self) -> int:
        """Return how many ranks run it."""
        return self.count

    @property
    def mask(self) -> Mask:
        """Return the pairs that attend, over the whole sequence; a pack counts as one document."""
        whole = self.whole
        if whole.keys and whole.mask is None:
            return cross_documents([whole.length], [whole.keys], causal=whole.causal, window_size=whole.window_size)
        return whole.mask or of_window(whole.length, whole.causal, whole.window_size)

    @property
    def looks_ahead(self) -> bool:
        """Return whether a token attends to a later one."""
        return self.whole.keys > 0 or any(min(tile.hi, tile.kv.hi - 1 - tile.q.lo) > 0 for tile in self.mask.tiles)

    @property
    def public(self) -> bool:
        """Run by the public functions: all but several ranks in one process are."""
        return self.over != "together" or self.ranks == 1

    @property
    def line(self) -> str:
        """Return the command that runs it again."""
        return f"{super().line} --ranks {self.ranks}" + (" --device cuda" if self.whole.device != "cpu" else "")


def draw(seed: int, number: int, over: str, device: str = "cpu", ranks: Sequence[int] = ()) -> Case:
    """Draw the case of that number: equal arguments give equal cases.

    Args:
        ranks: the numbers of ranks to choose from, all up to MOST_RANKS if empty. The rest of a case depends on it.
    """
    name = f"{seed} {number} {over} {device}"
    dice, apart, on_gpu = random.Random(name), random.Random(f"lengths {name}"), device != "cpu"
    some = random.Random(f"ranks {name}").choice([*(ranks or range(1 if over == "together" else 2, MOST_RANKS + 1))])
    public = over != "together" or some == 1
    packed = dice.random() < 0.4
    layout = dice.choice(list(LAYOUTS) if packed else ["contiguous", "contiguous", "zigzag"])
    lengths, keys = apart.random() < 0.3, 0  # of the ranks differ; drawn apart, so that all else stays as it was
    local = dice.choice(
        [16, 33, 64, 130, 130 if layout == "zigzag" else 256] if on_gpu else [1, 1, 2, 3, 5, 7, 12, 20, 33]
    )
    tokens = some * local * (2 if layout == "zigzag" else 1)
    if lengths:
        tokens = max(1, tokens - apart.randrange(some + 1))
        held = drawn_layout(apart, some, tokens)
        keys = apart.choice([0, 0, tokens, max(1, tokens + apart.randint(-tokens, 2 * some))]) if not packed else 0
    shape = GPU_CLASSES[number % len(GPU_CLASSES)] if on_gpu else _shape(dice)
    sees: dict[str, Any] = {"causal": dice.random() < 0.6, "window_size": dice.choice(WINDOWS)}
    if not packed and dice.random() < 0.7:
        named = [case.mask for case in (*every_mask(tokens, dice), *heterogeneous_masks(tokens, dice))]
        sees = {"mask": dice.choice(named) if dice.random() < 0.4 else _of_many_parts(tokens, dice)}
    if keys:
        sees |= {"keys": keys, "mask": of_two(tokens, keys, apart) if "mask" in sees else None}
        held = cross(held, drawn_layout(apart, some, keys))
    if lengths:
        layout = "contiguous" if held.in_order else "load_balanced"
    # Most queries of two sequences see keys of later ranks, which the balanced schedules refuse.
    serve = [each for each in LAYOUTS[layout] if not keys or "balanced" not in each or apart.random() < 0.1]
    offsets = random_offsets(tokens, dice) if packed else ()
    rows, offsets, placed = _rows_beside(f"rows {name}", offsets, held if lengths else layout, some)
    whole = _whole(dice, shape, tokens, offsets, **sees, **rows, seed=seed * 1_000_003 + number, device=device)
    return Case(
        seed=seed,
        number=number,
        over=over,
        count=some,
        whole=whole,
        options={
            "schedule": dice.choice(serve),
            "layout": placed,
            "kernel": dice.choice(GPU_KERNELS if on_gpu else CPU_KERNELS),
            "ulysses_degree": _degree(dice, some, shape.heads, of_two=bool(keys)) if public else 1,
            "transport": dice.choice(["auto", "p2p", "copy_engine"]) if over == "nccl" else "auto",
            "verify": dice.choice(["on", "on", "off"]),
        },
        checkpoint=dice.choice(CHECKPOINTS) if public else "none",
        compiled=public and not packed and dice.random() < 0.02,
        deterministic=shape.deterministic,
    )


def _rows_beside(name: str, offsets: tuple[int, ...], layout: Any, ranks: int) -> tuple[dict[str, Any], Any, Any]:
    """Draw the documents of other rows beside these in three of ten packs: what a case says of them, joined."""
    dice = random.Random(name)
    if not offsets or dice.random() > 0.3:
        return {}, offsets, layout
    rows = (offsets, *(random_offsets(offsets[-1], dice) for _ in range(dice.randrange(3))))
    return {"apart": rows, "layout": layout}, *join_rows(rows, layout, ranks)


def of_two(queries: int, keys: int, dice: random.Random) -> Mask:
    """Draw documents of queries and of keys in pairs, or a union of bands."""
    if dice.random() < 0.5:
        cuts = [sorted(dice.choices(range(n + 1), k=3)) for n in (queries, keys)]
        parts = [[b - a for a, b in pairwise([0, *cut, n])] for cut, n in zip(cuts, (queries, keys), strict=True)]
        found = cross_documents(*parts, causal=dice.random() < 0.5)
    else:
        square = _of_many_parts(max(queries, keys), dice)
        near = [Tile(t.q & Span(0, queries), t.kv & Span(0, keys), t.lo, t.hi) for t in square.tiles]
        found = two_sequences("bands of two", queries, keys, near)
    return found if found.tiles else cross_documents([queries], [keys])


def _of_many_parts(tokens: int, dice: random.Random) -> Mask:
    """Draw trees, deep or flat, one or several, with or without a window, or a union of bands: of up to 64 parts."""
    count, turn = dice.randint(1, min(MOST_PARTS, tokens)), dice.random()
    if dice.random() < 0.6:
        edges = [0, *sorted(dice.sample(range(1, tokens), count - 1)), tokens]
        parents: list[int] = []
        for last in range(-1, count - 1):
            above = ancestors(last, parents)
            parents.append(
                -1 if not above or dice.random() < turn / 4 else dice.choice(above[: dice.choice([1, 2, count])])
            )
        reach = dice.choice([-1, -1, dice.randint(0, tokens)])
        return prompt_tree([b - a for a, b in pairwise(edges)], parents, window=reach)
    tiles = [Tile(Span(0, tokens), Span(0, tokens), 0, 0)]
    for _ in range(count):
        (a, b), (c, d) = (sorted(dice.choices(range(tokens + 1), k=2)) for _ in range(2))
        lo = dice.choice([-UNBOUNDED, dice.randint(-tokens, tokens)])
        hi = dice.choice([UNBOUNDED, max(lo, -tokens) + dice.randint(0, tokens), 0])
        tiles.append(Tile(Span(a, b), Span(c, d), lo, hi))
    return union("bands", tokens, tiles)


def _whole(dice: random.Random, shape: ShapeClass, tokens: int, offsets: tuple[int, ...], **more: Any) -> attend.Case:
    return attend.Case(
        tokens=tokens,
        offsets=offsets,
        batch=1 if more["device"] != "cpu" and tokens > 1024 else dice.choice([1, 1, 2, 3]),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        dtype=getattr(torch, shape.dtype),
        softmax_scale=dice.choice([None, None, 0.3]),
        softcap=shape.softcap,
        with_sinks=dice.random() < 0.3,
        first_in_memory=dice.choice(["", "", "tokens", "heads"]),
        **more,
    )


def _shape(dice: random.Random) -> ShapeClass:
    kv_heads, head_dim = dice.choice([1, 1, 2, 3]), dice.choice([4, 8, 9, 16])
    return ShapeClass(
        dtype=dice.choice(DTYPES),
        heads=kv_heads * dice.choice([1, 2, 3, 4]),
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim if dice.random() < 0.75 else dice.choice([1, 5, 8, 24]),
        softcap=dice.choice([0.0, 0.0, 0.0, 2.0]),
        deterministic=dice.random() < 0.3,
    )


_ALONE: tuple[int | str, ...] = (1, 1, 1, "auto")
"""Degrees of a single rank."""


def _degree(dice: random.Random, ranks: int, heads: int, *, of_two: bool) -> int | str:
    """Draw a degree: most often 1, else one that divides ranks and heads, or auto; in one case of fifty any.

    of_two: queries and keys are two sequences, which exchange no heads.
    """
    if ranks == 1 or (of_two and dice.random() < 0.9):
        return dice.choice(_ALONE)
    if dice.random() < 0.02:
        return dice.choice([2, 3])
    degrees = [degree for degree in range(2, ranks + 1) if ranks % degree == 0 and heads % degree == 0]
    of_some: list[int | str] = ["auto", *degrees, *degrees]
    return dice.choice([1, 1, dice.choice(of_some)])
