"""The draws that tests run: the first few of a seed."""

from __future__ import annotations

import math

from tests.fuzz.frameworks.serve import module_of, run

SEED = 0


def check(framework: str, draws: int) -> None:
    """Assert that none of the first draws is wrong, fails or hangs, and that most of them run."""
    drawn = [module_of(framework).draw(SEED, number) for number in range(draws)]
    outcomes = [(draw.line, outcome) for draw, outcome in run(framework, drawn, 60.0, math.inf)]
    off = [f"{o.kind.upper()} {line}\n{o.reason}" for line, o in outcomes if o.kind not in ("right", "refused")]
    assert not off, "\n".join(off)
    assert len(outcomes) == draws
    assert sum(outcome.kind == "right" for _, outcome in outcomes) > draws / 2
