"""What became of a draw, and counts of many."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

TOLD = 20
"""Failures that are printed; the file has all of them."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A random case, drawn from a seed and a number, so that both say all of it."""

    over: ClassVar[str]
    """What runs it: a name of the option --over."""
    seed: int
    number: int

    @property
    def ranks(self) -> int:
        """Return how many ranks run it."""
        raise NotImplementedError

    @property
    def start(self) -> tuple[Any, ...]:
        """Return what its groups of ranks depend on: draws of the same are run one after another."""
        return ()

    @property
    def line(self) -> str:
        """Return the command that runs it again."""
        return f"python -m tests.fuzz --over {self.over} --seed {self.seed} --case {self.number}"

    def features(self) -> Iterator[str]:
        """Yield what a run counts: the ranks, and each field or entry of a field that is not the default."""
        yield f"{self.ranks} ranks"
        yield from _told(self)


def _told(one: Any) -> Iterator[str]:
    """Yield the fields of a dataclass: words, options and small numbers with their values."""
    for each in fields(one):
        value = getattr(one, each.name)
        if each.name in ("seed", "number", "name") or not value or value == each.default:
            continue
        if each.name in ("whole", "data"):
            yield from _told(value)
        elif isinstance(value, Mapping):
            yield from (f"{name} {x}" if isinstance(x, str | int) else name for name, x in value.items() if x)
        elif each.name == "masks":
            yield from {f"mask {kind}" for kind in value}
        elif each.name == "mask":
            yield f"mask {value.name.partition('(')[0]}"
        else:
            few = isinstance(value, str | torch.dtype) or (type(value) is int and value < 10)
            yield f"{each.name} {value}" if few else each.name


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the outcome of a draw, on one rank or in all.

    kind: "right", "refused", "wrong", "failed", "hung", or "unfinished" where a run's time was over. reason: of a
    refusal, or what is wrong. worst: the largest difference as a share of what is tolerated.
    """

    number: int
    kind: str
    reason: str = ""
    worst: float = 0.0


@dataclass(slots=True)
class Tally:
    """Counts of a run; `failures` are (kind, the line that runs a draw again, what is wrong with it)."""

    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, draw: Draw, outcome: Outcome) -> None:
        """Count one draw; features are counted of those that were right."""
        self.kinds[draw.over][outcome.kind] += 1
        if outcome.kind == "right":
            self.features.update(f"{draw.over}: {name}" for name in draw.features())
            self.worst[draw.over] = max(self.worst.get(draw.over, 0.0), outcome.worst)
        elif outcome.kind == "refused":
            self.refusals[f"{draw.over}: {outcome.reason}"] += 1
        elif outcome.kind != "unfinished":
            self.failures.append((outcome.kind, draw.line, outcome.reason))

    @property
    def succeeded(self) -> bool:
        """Return whether some draws were right, and all others refused."""
        return not self.failures and any(counts["right"] for counts in self.kinds.values())

    def head(self) -> str:
        """Return the counts, a line for each of what runs draws."""
        lines = [f"in {self.seconds:.0f} s"]
        for over, counts in self.kinds.items():
            lines += [f"{over:14}" + ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())]
        return "\n".join(lines)

    def text(self) -> str:
        """Return everything as text."""
        lines = ["right, by feature:"]
        lines += [f"  {count:>8,} {name}" for name, count in sorted(self.features.items())]
        lines += [f"refused, {count:>6,} {reason}" for reason, count in self.refusals.most_common()]
        lines += [f"largest difference, as a share of the limit: {name} {x:.2g}" for name, x in self.worst.items()]
        for kind, line, reason in self.failures[:TOLD]:
            lines += [f"{kind.upper()} {line}", *(f"    {part}" for part in reason.splitlines()[-4:])]
        lines += [f"and {len(self.failures) - TOLD} more"] if len(self.failures) > TOLD else []
        return "\n".join([*lines, self.head()])

    def write(self, path: Path, **about: Any) -> None:
        """Write JSON: `about` the run, then the counts and all failures."""
        counts = {"kinds": self.kinds, "refusals": self.refusals, "features": self.features, "worst": self.worst}
        failures = [{"kind": kind, "line": line, "reason": reason} for kind, line, reason in self.failures]
        report = {**about, "seconds": round(self.seconds, 1), **counts, "failures": failures}
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(path)  # whoever ends the run leaves a whole report
