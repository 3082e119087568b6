"""Judge a run over the ranks by one alone, with limits from what rounding noise does to that one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from dfa_megatron.proving.recorder import Recording

FACTOR = 8.0
"""How far beyond the noise a difference counts: of a gradient, the loss, or a token beyond the worst token's noise."""

WHOLE = 5.0
"""The same of all tokens together, whose mean square hardly depends on the noise that was drawn."""

LEAST = 1e-4
"""A limit is at least this: sums in another order differ in float32."""

KINDS = ("choice of keys", "output of layers", "gradient at layers", "loss", "gradient of parameters")
"""What is compared, in the order in which a difference is named: a token says more than the loss."""

OTHER_KEYS = 0.01
"""Share of the keys that indexers choose which may be others: rounding decides between nearly equal scores."""

SMALL = 1e-3
"""Gradients are compared with this part of the largest one, where they are smaller: some are 0 but for rounding."""


@dataclass(slots=True)
class Row:
    """One kind of thing in one text: how many were compared, and the one that is largest beside its limit."""

    text: str
    kind: str
    count: int = 0
    largest: float = 0.0
    limit: float = LEAST
    first: str = ""
    """The first difference; empty where there is none."""

    def add(self, distance: float, limit: float, what: str) -> None:
        """Count one distance; what it is of is said if it is the first beyond its limit."""
        self.count += 1
        if not distance <= limit:  # NaN differs
            self.first = self.first or what
        self.keep(distance, limit)

    def keep(self, distance: float, limit: float) -> None:
        """Keep a distance and its limit if none was larger beside its own; NaN is."""
        if not math.isnan(self.largest) and not distance * self.limit < self.largest * limit:
            self.largest, self.limit = distance, limit


@dataclass(slots=True)
class Proof:
    """The outcome: rows of all ranks, in the order in which a difference is named, and what nobody looked at."""

    title: str
    ranks: int
    seconds: float = 0.0
    """What it took on the slowest rank."""
    rows: list[Row] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def difference(self) -> str:
        """The first difference, empty if there is none."""
        return next((f"{row.text}, {row.kind}: {row.first}" for row in self.rows if row.first), "")

    def __str__(self) -> str:
        """Return the table as plain text."""
        rows = [
            (row.text, row.kind, str(row.count), f"{row.largest:.1e}", f"{row.limit:.1e}", "differs" * bool(row.first))
            for row in self.rows
        ]
        lines = [f"prove: {self.title}", "", *columns(("run", "compared", "number", "largest", "limit", ""), rows), ""]
        lines += [f"not looked at: {line}" for line in self.unseen]
        right = f"{self.ranks} ranks compute what one rank computes; it took {self.seconds:.1f} s"
        return "\n".join([*lines, f"first difference: {self.difference}" if self.difference else right])


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    table = [head, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def judge(text: str, got: Recording, want: Recording, noise: Recording, rank: int) -> list[Row]:
    """Return a rank's rows for one text."""
    rows = [Row(text, kind) for kind in KINDS]
    _keys(rows[0], got, want, noise)
    tokens(rows[1], got, (got.hidden, want.hidden, noise.hidden))
    tokens(rows[2], got, (got.backward, want.backward, noise.backward))
    if want.loss is not None and got.loss is not None and noise.loss is not None:
        last = [(x - y).norm() / x.norm() for x, y in zip(want.hidden.values(), noise.hidden.values(), strict=True)]
        least = max(abs(noise.loss - want.loss), 0.25 * abs(want.loss) * (float(last[-1]) if last else 0.0))
        scale = abs(want.loss) or 1.0
        limit = FACTOR * least / scale + LEAST
        rows[3].add(abs(got.loss - want.loss) / scale, limit, f"{got.loss:.6g}, on one rank {want.loss:.6g}")
    largest = max((float(x.norm()) for x in want.weights.values()), default=0.0)
    scales = {name: max(float(x.norm()), SMALL * largest) or 1.0 for name, x in want.weights.items()}
    drawn = {name: float((noise.weights[name] - x).norm()) / scales[name] for name, x in want.weights.items()}
    usual = median(drawn.values()) if drawn else 0.0
    for name, x in want.weights.items():
        distance = float((got.weights[name] - x).norm()) / scales[name]
        what = f"{name} on rank {rank} is off by {distance:.1e} of its length"
        rows[4].add(distance, FACTOR * max(drawn[name], usual) + LEAST, what)
    return rows


def _keys(row: Row, got: Recording, want: Recording, noise: Recording) -> None:
    """Compare the keys that each indexer chose."""
    for name, number in want.choices:
        ours, theirs, noisy = (_shown(each.choices[name, number]) for each in (got, want, noise))
        error, drawn = ((x ^ theirs).sum(1) / (2 * theirs.sum(1)).clamp(min=1) for x in (ours, noisy))
        at = int(error.argmax())
        said = f"{name} on rank {int(got.holders[at])}, token {at}: {error[at]:.0%} of its keys"
        row.add(float(error.mean()), FACTOR * float(drawn.mean()) + OTHER_KEYS, said)


def _shown(keys: torch.Tensor) -> torch.Tensor:
    """Return which keys each query chose, bool (queries, keys), of their numbers (queries, topk), -1 for none."""
    shown = torch.zeros(len(keys), len(keys) + 1, dtype=torch.bool)
    return shown.scatter_(1, torch.where(keys < 0, len(keys), keys), True)[:, :-1]


def tokens(row: Row, got: Recording, sketches: tuple[dict[str, torch.Tensor], ...]) -> None:
    """Compare token by token what layers gave, and name the first one of the first layer."""
    for name in sketches[0]:
        if not all(name in each for each in sketches):
            row.add(math.inf, LEAST, f"{name} gives rows for each token on one rank only, or on several only")
            continue
        ours, theirs, noisy = (each[name] for each in sketches)
        usual = float(theirs.norm(dim=1).square().mean().sqrt()) or 1.0
        drawn, error = ((x - theirs).norm(dim=1).nan_to_num(nan=math.inf) / usual for x in (noisy, ours))
        limit, whole = FACTOR * float(drawn.max()) + LEAST, WHOLE * float(drawn.square().mean().sqrt()) + LEAST
        worst, mean = float(error.max()), float(error.square().mean().sqrt())
        at = int((error > limit).nonzero()[0]) if worst > limit else int(error.argmax())
        said = f"{name} on rank {int(got.holders[at])}, token {at}: off by {float(error[at]):.1e} of its usual size"
        row.add(*((worst, limit) if worst * whole >= mean * limit else (mean, whole)), said)


def merged(everyone: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of all ranks as one rank's, in the order in which a run computes."""
    whole: dict[tuple[str, str], Row] = {}
    for rows in everyone:
        for row in rows:
            if not row.count:
                continue
            known = whole.setdefault((row.text, row.kind), Row(row.text, row.kind))
            known.count = max(known.count, row.count)
            known.keep(row.largest, row.limit)
            known.first = known.first or row.first
    runs = list(dict.fromkeys(text for text, _ in whole))
    return sorted(whole.values(), key=lambda row: (runs.index(row.text), KINDS.index(row.kind)))
