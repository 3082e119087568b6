"""Count the draws of a run by framework, feature and refusal, with one line for each that is wrong."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.frameworks.outcome import Draw, Outcome

KINDS = ("right", "refused", "wrong", "failed", "hung")
TOLD = 20
"""Failures that are printed; the file has all of them."""


@dataclass(slots=True)
class Tally:
    """Counts of a run; `failures` are (kind, the line that runs a draw again, what is wrong with it)."""

    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, framework: str, draw: Draw, outcome: Outcome) -> None:
        """Count one draw; features are counted of those that were right."""
        self.kinds[framework][outcome.kind] += 1
        if outcome.kind == "right":
            self.features.update(f"{framework}: {name}" for name in draw.features())
            self.worst[framework] = max(self.worst.get(framework, 0.0), outcome.worst)
        elif outcome.kind == "refused":
            self.refusals[f"{framework}: {outcome.reason}"] += 1
        else:
            self.failures.append((outcome.kind, draw.line, outcome.reason))

    def head(self) -> str:
        """Return the counts as a table."""
        rows = [f"{'':14}" + "".join(f"{kind:>9}" for kind in KINDS)]
        for framework, counts in self.kinds.items():
            rows.append(f"{framework:14}" + "".join(f"{counts[kind]:>9,}" for kind in KINDS))
        return "\n".join([*rows, f"in {self.seconds:.0f} s"])

    def text(self) -> str:
        """Return everything as text."""
        lines = ["right, by feature:"]
        lines += [f"  {count:>6,} {name}" for name, count in sorted(self.features.items())]
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
