"""Sizes of an attention that its plan does not fix: bytes of messages, and heads split around a plan.

Neighbours that exchange heads (Ulysses) split heads and tokens among themselves; stages split heads over time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import gcd
from operator import itemgetter
from typing import Literal

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import Span, joined_spans
from dfa_megatron.plan.language.ir import Phase
from dfa_megatron.plan.language.layout import Layout

LAUNCH, ROW, KEY, GATHER = 1 << 20, 600, 380, 280
"""What a launch takes, forward and backward, in pairs that a kernel computes in that time, for each query head.

LAUNCH: by itself. ROW: each query row, which it reads, writes and merges. KEY: each key row, for its kv heads alone,
where gradients are summed in float32. GATHER: one more that is copied, its gradients summed. Seen on H100.
"""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one attention that its plan does not fix.

    Args:
        batch: sequences per call.
        heads, kv_heads: of q, and of k and v; kv_heads divides heads.
        head_dim, head_dim_v: of q and k, and of v and out (None: the same).
        bytes_per_element: of q, k, v, dout and out.
        accumulator_bytes: of lse and delta.
        backward_needs: tensor that a helper's backward receives beside q, dout and lse: "out" or "delta".

    Raises:
        UnsupportedError: a size is not positive, or kv_heads does not divide heads.
    """

    batch: int = 1
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    head_dim_v: int | None = None
    bytes_per_element: int = 2
    accumulator_bytes: int = 4
    backward_needs: Literal["delta", "out"] = "out"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "bytes_per_element"):
            if getattr(self, name) <= 0:
                raise UnsupportedError(f"{name}={getattr(self, name)}", "it must be positive", "1 or more")
        if self.heads % self.kv_heads:
            why = "heads must be a multiple of kv_heads"
            raise UnsupportedError(f"{self.heads} heads with {self.kv_heads} kv_heads", why, "for example equal counts")
        if self.backward_needs not in ("delta", "out"):
            raise UnsupportedError(f"backward_needs={self.backward_needs!r}", "there is no such value", "delta, out")

    @property
    def value_dim(self) -> int:
        """Return the head dimension of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    def flops_per_pair(self, phase: Phase) -> int:
        """Return floating-point operations of one (query, key) pair over all heads: 2 products forward, 5 backward."""
        qk, pv = self.head_dim, self.value_dim
        products = qk + pv if phase.name == "forward" else 3 * qk + 2 * pv
        return 2 * self.batch * self.heads * products


def bytes_of(name: str, tokens: int, shape: AttentionShape) -> int:
    """Return bytes of `tokens` rows of a name in a message, without the padding between its fields."""
    fields = fields_of(
        name, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, needs_delta=shape.backward_needs == "delta"
    )
    row = sum(n * (width * shape.bytes_per_element or shape.accumulator_bytes) for _, n, width in fields)
    return shape.batch * tokens * row


def fields_of(
    name: str, heads: int, kv_heads: int, dim: int, dim_v: int, *, needs_delta: bool
) -> tuple[tuple[str, int, int], ...]:
    """Return (field, heads, width) of the tensors of a name, in messages and in memory.

    A width of 0 is a statistic: one number of the accumulator's dtype. All else has q's dtype in messages.
    """
    match name:
        case "q":
            return (("q", heads, dim),)
        case "kv":
            return ("k", kv_heads, dim), ("v", kv_heads, dim_v)
        case "out":
            return ("out", heads, dim_v), ("lse", heads, 0)
        case "qdo":
            memory = ("minus_delta", heads, 0) if needs_delta else ("out", heads, dim_v)
            return ("q", heads, dim), ("dout", heads, dim_v), ("lse", heads, 0), memory
        case "dq":
            return (("dq", heads, dim),)
        case "dkv":
            return ("dk", kv_heads, dim), ("dv", kv_heads, dim_v)
    raise ValueError(f"no name {name!r} travels: q, kv, out, qdo, dq, dkv do")


def check_degree(degree: int, ranks: int, heads: int) -> None:
    """Refuse a degree that does not divide both the ranks of the group and the query heads of each rank.

    Raises:
        UnsupportedError: the message lists the degrees that would work.
    """
    works = [str(d) for d in range(1, ranks + 1) if ranks % d == 0 and heads % d == 0]
    instead = f"a degree that divides both {ranks} ranks and {heads} heads: {', '.join(works)}"
    what = f"ulysses_degree={degree}"
    if degree < 1 or ranks % degree:
        raise UnsupportedError(f"{what} on a group of {ranks} ranks", "the degree must divide the ranks", instead)
    if heads % degree:
        raise UnsupportedError(f"{what} with {heads} heads", "every rank must get as many heads as the others", instead)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads that each rank of an exchange group computes.

    degree: number of ranks that exchange heads with each other.
    heads, kv_heads: of each rank.
    copies: number of places that hold each of the caller's kv heads; above 1 if several ranks have query heads of it.
        Place t of rank r is the (r * kv_heads + t) // copies-th kv head.
    """

    degree: int
    heads: int
    kv_heads: int
    copies: int

    def shape(self, whole: AttentionShape) -> AttentionShape:
        """Return the shape that one rank of the plan computes."""
        return replace(whole, heads=self.heads, kv_heads=self.kv_heads)

    @property
    def keeps(self) -> bool:
        """Return whether the exchanged q, k and v take no more memory than the originals, and can be saved instead."""
        return self.copies == 1

    def exchanges(self, whole: AttentionShape, tokens: int, *, kept: bool = False) -> tuple[int, ...]:
        """Return bytes, without padding, that a rank sends before and after a forward, then around a backward.

        Args:
            whole: the shape of the call.
            tokens: of the rank.
            kept: the backward reuses the exchanged q, k, v of the forward if `keeps`; nothing is rematerialized.
        """
        q, kv, out, qdo = (bytes_of(name, tokens, self.shape(whole)) for name in ("q", "kv", "out", "qdo"))
        backward = qdo - q if kept and self.keeps else qdo + kv
        return tuple((self.degree - 1) * nbytes for nbytes in (q + kv, out, backward, q + kv))

    def sent(self, whole: AttentionShape, tokens: int, *, kept: bool = False) -> tuple[int, int]:
        """Return bytes that a rank with `tokens` tokens sends around a forward, and around a backward."""
        nbytes = self.exchanges(whole, tokens, kept=kept)
        return sum(nbytes[:2]), sum(nbytes[2:])


def split_heads(degree: int, ranks: int, heads: int, kv_heads: int) -> HeadSplit:
    """Return the split of heads over each `degree` of `ranks` ranks.

    Raises:
        UnsupportedError: the heads cannot be split that way.
    """
    check_degree(degree, ranks, heads)
    mine, group = heads // degree, heads // kv_heads
    # Query heads in blocks of this many belong to one rank and to one kv head; a block gets its own copy of that.
    block = gcd(mine, group)
    return HeadSplit(degree, mine, mine // block, group // block)


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """The tokens of a rank of the plan, and the ranks that bring them together.

    exchange_group: ranks of the group that exchange heads with this one: neighbours, so that they share a node.
    plan_group: ranks of the group that run a plan with this one; all of them compute the same heads.
    rows: tokens of each rank of `exchange_group`.
    gathered: (position in `exchange_group`, its rows) in the order of the plan's tokens, or () where that is the order
        of the ranks and all hold equally many.
    """

    exchange_group: range
    plan_group: range
    rows: tuple[int, ...]
    gathered: tuple[tuple[int, Span], ...]

    @property
    def returned(self) -> tuple[tuple[int, Span], ...]:
        """Return the inverse of `gathered`: (position, rows of the gathered tokens) in the order of the ranks."""
        edges = accumulate((len(rows) for _, rows in self.gathered), initial=0)
        placed = [
            (rank, rows.lo, Span(at, at + len(rows))) for (rank, rows), at in zip(self.gathered, edges, strict=False)
        ]
        return tuple((rank, rows) for rank, _, rows in sorted(placed))


def split_tokens(degree: int, rank: int, layout: Layout) -> TokenSplit:
    """Return how the tokens of neighbours form the tokens of one rank of the plan, whose layout is `merged(degree)`.

    Args:
        degree: ranks that exchange heads with each other; it divides the ranks of the layout.
        rank: this rank in the group.
        layout: the tokens that each rank of the group holds.

    Raises:
        UnsupportedError: queries and keys are two sequences.
    """
    if layout.queries is not None:
        what, why = f"ulysses_degree={degree} for two sequences", "an exchange brings one sequence together"
        raise UnsupportedError(what, why, "ulysses_degree=1")
    exchange_group = range(rank - rank % degree, rank - rank % degree + degree)
    at = {chunk: (position, row) for position, r in enumerate(exchange_group) for chunk, row in layout.rows(r).items()}
    held = layout.merged(degree).of(rank // degree)
    found = [(*at[chunk], len(layout.chunks[chunk])) for chunk in held]
    gathered = tuple((position, Span(row, row + size)) for position, row, size in found)
    rows = tuple(layout.tokens(other) for other in exchange_group)
    joined = [(position, joined_spans([rows for _, rows in its])) for position, its in groupby(gathered, itemgetter(0))]
    in_order = joined == [(position, [Span(0, rows[0])]) for position in range(degree)]
    return TokenSplit(exchange_group, range(rank % degree, layout.ranks, degree), rows, () if in_order else gathered)
