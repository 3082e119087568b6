"""Heads that neighbours exchange for tokens (Ulysses): which degrees there are, who gets which, and which one suits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.geometry import UNBOUNDED, Span
from dfa_megatron.plan.language.mask import Mask


def check_degree(degree: int, ranks: int, heads: int) -> None:
    """Refuse a degree that does not divide both the ranks of the group and the query heads of each rank."""
    works = [str(d) for d in range(1, ranks + 1) if ranks % d == 0 and heads % d == 0]
    instead = f"a degree that divides both {ranks} ranks and {heads} heads: {', '.join(works)}"
    what = f"ulysses_degree={degree}"
    if degree < 1 or ranks % degree:
        raise UnsupportedError(f"{what} on a group of {ranks} ranks", "the degree must divide the ranks", instead)
    if heads % degree:
        raise UnsupportedError(f"{what} with {heads} heads", "every rank must get as many heads as the others", instead)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads that each of `degree` neighbours computes.

    heads, kv_heads: of each rank.
    copies: number of places that hold each of the caller's kv heads; above 1 if several ranks have query heads of it.
        Place t of rank r is the (r * kv_heads + t) // copies-th kv head.
    """

    degree: int
    heads: int
    kv_heads: int
    copies: int


def split_heads(degree: int, ranks: int, heads: int, kv_heads: int) -> HeadSplit:
    """Return the split of heads over each `degree` of `ranks` ranks, or refuse it."""
    check_degree(degree, ranks, heads)
    mine, group = heads // degree, heads // kv_heads
    # Query heads in blocks of this many belong to one rank and to one kv head; a block gets its own copy of that.
    block = math.gcd(mine, group)
    return HeadSplit(degree, mine, mine // block, group // block)


_SLOW = {2: ((4096, 8192), None), 4: ((0, 16384), (4096, 8192)), 8: ((0, 16384), (0, 8192))}
"""Ranks of a host without peer access, from how many on: (least, most) tokens of a rank for which all of them exchange,
with as many key heads as query heads, and with fewer. Two to four H200:
benchmarks/results/2026-11-22-4xh200-p2p-off-degrees-flash4.json and 2026-11-22-2xh200-p2p-off-heads-flash4.json. Beyond
four, the planner's simulation of 2026-11-29.
"""

_SHORT = {"nvlink": 2048, "adapters": 8192}
"""Tokens of a rank up to which eight ranks and more exchange, because their hosts issue fewer messages; simulated."""


def automatic_degree(mask: Mask, ranks: int, heads: int, kv_heads: int, schedule: str, hardware: Hardware) -> int:
    """Return the number of neighbours that exchange heads for ulysses_degree="auto"; 1 exchanges nothing.

    A schedule that is named runs over all ranks. Masks but for one causal or full sequence send less.

        link            neighbours
        NVLink          all of 8 ranks or more, for short slices; else none
        slow links      all, where slices are neither too short nor long
        adapters        those of a host, of 8 ranks or more, for short slices
        sockets         those of a host; all of more than two hosts with as many key heads as query heads
    """
    whole = Span(0, mask.length)
    if schedule != "auto" or [tile[:3] for tile in mask.tiles] != [(whole, whole, -UNBOUNDED)]:
        return 1
    tokens = mask.length // ranks
    grouped, host = kv_heads < heads, hardware.node_size(ranks) or ranks
    if hardware.network is None and hardware.link.bytes_per_second < 100e9:
        table = [sides for least, sides in _SLOW.items() if least <= ranks]
        limits = table[-1][grouped] if table else None
        wanted = min(ranks, kv_heads) if limits and limits[0] <= tokens <= limits[1] else 1
    elif host < ranks and hardware.network is not None and hardware.network.bytes_per_second < 10e9:
        wanted = ranks if not grouped and (host == 1 or ranks > 2 * host) else host
    else:
        short = tokens <= _SHORT["nvlink" if hardware.network is None else "adapters"]
        wanted = host if ranks >= 8 and short else 1
    return max(degree for degree in range(1, wanted + 1) if math.gcd(ranks, heads) % degree == 0)
