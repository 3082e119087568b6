"""Count the cases of a run by feature and by refusal, with one line for each failure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.attempt import Verdict
from tests.fuzz.random_case import Case

TOLD = 20
"""Failures that are printed; the file has all of them."""


@dataclass(slots=True)
class Summary:
    """Counts of a run; `failures` are (the line that runs a case again, what is wrong with it)."""

    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count one case; features are counted of those that ran."""
        self.kinds[verdict.kind] += 1
        if verdict.kind == "failed":
            self.failures.append((case.line, verdict.reason))
        elif verdict.kind == "refused":
            self.refusals[verdict.reason] += 1
        elif verdict.kind == "right":
            self.features.update(case.features())
            self.worst[case.dtype] = max(self.worst.get(case.dtype, 0.0), verdict.worst)

    def head(self) -> str:
        """Return the counts in one line."""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.kinds.items(), reverse=True))
        return f"{sum(self.kinds.values()):,} cases in {self.seconds:.0f} s: {counts}"

    def text(self) -> str:
        """Return the counts as text."""
        lines = [self.head()]
        lines += [f"  refused, {count:>6,}: {reason}" for reason, count in self.refusals.most_common()]
        lines += ["right, by feature:"]
        lines += [f"  {count:>8,} {name}" for name, count in sorted(self.features.items())]
        shares = ", ".join(f"{dtype} {share:.2g}" for dtype, share in sorted(self.worst.items()))
        lines += [f"largest error, in units of the tolerance: {shares}"]
        for line, reason in self.failures[:TOLD]:
            lines += [f"FAILED {line}", *(f"    {part}" for part in reason.splitlines()[-3:])]
        lines += [f"and {len(self.failures) - TOLD} more failures"] if len(self.failures) > TOLD else []
        return "\n".join(lines)

    def write(self, path: Path, **about: Any) -> None:
        """Write JSON: `about` the run, then the counts and all failures."""
        counts = {"kinds": self.kinds, "refusals": self.refusals, "features": self.features, "worst": self.worst}
        failures = [{"line": line, "reason": reason} for line, reason in self.failures]
        report = {**about, "seconds": round(self.seconds, 1), **counts, "failures": failures}
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        part.replace(path)  # whoever ends the run leaves a whole report
