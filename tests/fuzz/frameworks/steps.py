"""Run random steps of a framework, first on one rank, then over as many as each asks for, and compare."""

from __future__ import annotations

import functools
import importlib
import math
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from tests.frameworks.compare import Found, distances
from tests.fuzz.frameworks.expected_refusals import name_of
from tests.fuzz.outcome import Draw, Outcome
from tests.fuzz.serve import DRAWS_OF_A_GROUP, run_all
from tests.support.workers import by_turns, preload

PACKAGES = ("megatron", "transformers", "deepspeed")
"""The frameworks. The module NAME_step of each has `draw`, of (seed, number), `step`, `REFUSALS`, and `PRELOADED`,
modules that take long to import; perhaps `documented`, of a draw: what pages say of one that is computed otherwise."""


def module_of(framework: str) -> ModuleType:
    """Return the module of a framework's steps, or of its full name."""
    return importlib.import_module(f"tests.fuzz.frameworks.{framework}_step" if framework in PACKAGES else framework)


def prepare(*frameworks: str) -> None:
    """Have processes start with the modules of these frameworks; no effect once one has started."""
    preload("dfa_megatron.attention", *(name for framework in frameworks for name in module_of(framework).PRELOADED))


def run(framework: str, draws: Sequence[Draw], limit: float, deadline: float) -> Iterator[tuple[Draw, Outcome]]:
    """Run every draw, those of the same groups one after another.

    Args:
        limit: seconds for a draw, on one rank and on several.
        deadline: on the monotonic clock, after which no draw begins.
    """
    prepare(framework)
    some, attempt = sorted(draws, key=lambda d: (d.ranks, d.start, d.number)), functools.partial(_attempt, framework)
    for first in range(0, len(some), DRAWS_OF_A_GROUP):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            known = []
            for draw, outcome in run_all(attempt, some[first : first + DRAWS_OF_A_GROUP], 1, folder, limit, deadline):
                if outcome.kind == "right":
                    known.append(draw)
                else:
                    yield draw, outcome
            for ranks, group in groupby(known, key=lambda draw: draw.ranks):
                yield from run_all(attempt, list(group), ranks, folder, limit, deadline)


def check(framework: str, draws: int, seed: int = 0) -> None:
    """Assert that none of the first draws of a seed is wrong, fails or hangs, and that most of them run."""
    kinds = _kinds(framework, [module_of(framework).draw(seed, number) for number in range(draws)], "refused")
    assert kinds.count("right") > draws / 2


def check_each(framework: str, draws: Sequence[Draw]) -> None:
    """Assert that every draw is right: with DFA_HALF=0 or 1 of every second one."""
    _kinds(framework, by_turns(draws))


def _kinds(framework: str, draws: Sequence[Draw], *allowed: str) -> list[str]:
    """Assert that every draw is right, or of an allowed kind; return the kinds."""
    outcomes = [(draw.line, outcome) for draw, outcome in run(framework, draws, 60.0, math.inf)]
    off = [f"{o.kind.upper()} {line}\n{o.reason}" for line, o in outcomes if o.kind not in ("right", *allowed)]
    assert not off, "\n".join(off)
    assert len(outcomes) == len(draws)
    return [outcome.kind for _, outcome in outcomes]


def _attempt(framework: str, draw: Any, rank: int, ranks: int, folder: str) -> Outcome:
    """Run a draw on one rank and keep what it comes to, or over several and compare."""
    module, kept = module_of(framework), Path(folder, f"{draw.number}.pt")
    where = "on one rank: " if ranks == 1 else ""
    try:
        if told := getattr(module, "documented", lambda draw: "")(draw):
            return Outcome(draw.number, "refused", told)
        found = module.step(draw, rank, ranks)
        if ranks > 1:
            return _judge(draw, found, torch.load(kept, weights_only=True))
        torch.save(found.whole(), kept)
        finite = all(gradient.isfinite().all() for gradient in found.gradients.values())
        kind = ("right", "") if finite else ("refused", "no finite numbers on one rank")
        return Outcome(draw.number, *kind)
    except UnsupportedError as error:
        known = name_of(module.REFUSALS, draw, str(error))
        expected = known and (ranks > 1 or known == str(error))  # whatever it is, in the sweep
        kind = ("refused", known) if expected else ("failed", f"{where}refused: {known or error}")
        return Outcome(draw.number, *kind)
    except Exception:  # noqa: BLE001  # whatever it is, the run goes on and reports it
        return Outcome(draw.number, "failed", where + traceback.format_exc(limit=-8))


def _judge(draw: Any, found: Found, want: Mapping[str, Any]) -> Outcome:
    """Compare with one rank's loss and gradients."""
    limit = draw.limit
    shares = {name: share / limit for name, share in distances(found, want).items()}
    worst = max(shares.values(), default=0.0)
    if worst <= 1:
        return Outcome(draw.number, "right", worst=worst)
    off = [f"{name} {share * limit:.1e}" for name, share in sorted(shares.items(), key=lambda x: -x[1]) if share > 1]
    return Outcome(draw.number, "wrong", f"{len(off)} of {len(shares)} differ: {', '.join(off[:6])}", worst)
