"""What the benchmarks of packs share: a pack, methods over it, their check against float64, and their clock."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks import programs
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import NAMES, exact_of, too_far
from benchmarks.attention.failures import Failure, together
from benchmarks.bench import Call, Report, relative
from benchmarks.documents import Offsets, PackShapes
from dfa_megatron.doctor.dense import band_of
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}
BOTH = 3.5
"""Forward and backward, in forwards."""
ROW = 8
"""Calls in a row."""
ROUNDS = 4
"""After each the file is written."""


@dataclass(frozen=True)
class Shapes(PackShapes):
    """What is timed."""

    check_tokens: int = flag(128, "of a rank, in the comparison with float64")
    causal: bool = flag(True, "the mask of a document")
    dtype: str = flag("bfloat16", "of the tensors", choices=("bfloat16", "float32"))
    device: str = flag("auto", "where", choices=("auto", "cpu"))


@dataclass(frozen=True)
class Pack:
    """Documents one after another, and perhaps padding behind them.

    order: how ranks hold the tokens, for methods that need to know.
    """

    offsets: Offsets
    tokens: int
    order: Any = None


@dataclass(frozen=True)
class Method:
    """One way to attend over a pack.

    start: a pack -> the attention of this rank's tokens.
    places: where this rank's tokens are in the pack.
    exact: what is right, out and gradients, of all q, k, v and dout; None: attention.
    took: after a call, what "auto" came to, or "".
    """

    name: str
    start: Callable[[Pack], Attend]
    places: Callable[[Pack], torch.Tensor]
    exact: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    took: Callable[[], str] = str


def compare_and_time(
    methods: Sequence[Method], shapes: Shapes, small: Pack, pack: Pack, world: World, **about: Any
) -> tuple[Report, list[tuple[Method, dict[str, Any]]]]:
    """Compare every method on a small pack, time those that are right on the other, and write.

    Returns:
        The report, and the methods that were timed with their rows.
    """
    about |= {"documents": len(pack.offsets) - 1, "cu_seqlens": pack.offsets}
    report, timed = Report(shapes.out, shapes, about=about), list[tuple[Method, dict[str, Any], tuple[Timer, ...]]]()
    for method in methods:
        row = {"method": method.name, **errors_of(method, shapes, small, world)}
        report.add(row)
        if row["wrong"]:
            continue
        forward, both = passes(method, shapes, pack, world)
        for _ in range(3):
            both()
        if took := method.took():
            row["took"] = took
        forward()
        calls = forward, both, functools.partial(in_a_row, both)
        timed.append((method, row, tuple(Timer(call, max(1, shapes.repetitions // ROUNDS)) for call in calls)))
    pairs = sum((n * n + n) / 2 if shapes.causal else n * n for n in (hi - lo for lo, hi in pairwise(pack.offsets)))
    flops = 4 * pairs * shapes.heads * shapes.head_dim / world.size / 1e9
    for _ in range(ROUNDS):
        take_turns(world, [timer for *_, timers in timed for timer in timers])
        for method, row, (forward_timer, both_timer, row_timer) in timed:
            row |= {"forward_ms": forward_timer.median, "both_ms": both_timer.median}
            row |= {"host_ms": both_timer.host_median, "in a row ms": row_timer.median / ROW}
            if method.exact is None:
                row["forward TFLOP/s"] = flops / forward_timer.median
                row["both TFLOP/s"] = BOTH * flops / both_timer.median
                row["in a row TFLOP/s"] = ROW * BOTH * flops / row_timer.median
        report.write()
    for _, row, _ in timed:
        report.show(row)
    return report, [(method, row) for method, row, _ in timed]


def errors_of(method: Method, shapes: Shapes, pack: Pack, world: World) -> dict[str, Any]:
    """Return how far out, dq, dk and dv of the documents are from float64, on any rank, and what is wrong."""
    found = together(world, functools.partial(_errors, method, shapes, pack, world))
    if isinstance(found, Failure):
        return {"wrong": f"{found.state}: {found.why}"}
    worst = world.slowest([error if math.isfinite(error) else math.inf for error in found.values()])
    errors = dict(zip(found, worst, strict=True))
    return {"errors": errors, "wrong": too_far(errors, TOLERANCE[getattr(torch, shapes.dtype)])}


def _errors(method: Method, shapes: Shapes, pack: Pack, world: World) -> dict[str, float]:
    whole, at = _draw(shapes, pack, world), method.places(pack).to(world.device)
    q, k, v, dout = (x[at] for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = method.start(pack)(*leaves)
    got = out, *torch.autograd.grad(out, leaves, dout, allow_unused=True)
    exact = method.exact or functools.partial(exact_of, band=band_of(shapes.causal), offsets=pack.offsets)
    real = at < pack.offsets[-1]
    pairs = zip(NAMES, got, exact(whole), strict=False)
    return {name: relative(g[real], w[at][real]) for name, g, w in pairs if g is not None}


def passes(method: Method, shapes: Shapes, pack: Pack, world: World) -> tuple[Call, Call]:
    """Return the forward, and the forward and backward, of this rank."""
    at = method.places(pack).to(world.device)
    *leaves, dout = (x[at] for x in _draw(shapes, pack, world))
    return programs.passes(method.start(pack), leaves, dout, used=3 if method.exact is None else 1)


def in_a_row(both: Call) -> None:
    """Call it as often as `ROW` says."""
    for _ in range(ROW):
        both()


def _draw(shapes: Shapes, pack: Pack, world: World) -> list[torch.Tensor]:
    """Return q, k, v and dout of all tokens, the same on every rank of one kind of device; padding has no gradient."""
    where = {"generator": torch.Generator(world.device).manual_seed(1), "device": world.device}
    drawn = programs.draw(
        pack.tokens, shapes.heads, shapes.kv_heads, shapes.head_dim, dtype=getattr(torch, shapes.dtype), **where
    )
    drawn[3][:, pack.offsets[-1] :] = 0
    return [x[0] for x in drawn]
