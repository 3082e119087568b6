"""Run draws over processes that stay for many of them: first on one rank, then over as many as each asks for."""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from tests.fuzz.deadline import HUNG, within
from tests.fuzz.frameworks.expected_refusals import name_of
from tests.fuzz.frameworks.outcome import Draw, Outcome, judge
from tests.support.workers import preload, run_ranks

PACKAGES = ("megatron", "transformers", "deepspeed")
"""The frameworks. The module NAME_step of each has `draw`, of (seed, number), `step`, `documented`,
`REFUSALS`, and `PRELOADED`, modules that take long to import."""

DRAWS_OF_A_GROUP = 100
"""Draws that one group of processes runs, unless one of them loses it."""


def run(framework: str, draws: Sequence[Draw], limit: float, deadline: float) -> Iterator[tuple[Draw, Outcome]]:
    """Run every draw, those of the same groups one after another.

    Args:
        limit: seconds for a draw, on one rank and on several.
        deadline: on the monotonic clock, after which no new group of processes starts.
    """
    prepare(framework)
    left = sorted(draws, key=lambda draw: (draw.ranks, draw.start, draw.number))
    for first in range(0, len(left), DRAWS_OF_A_GROUP):
        if time.monotonic() > deadline:
            return
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            some = left[first : first + DRAWS_OF_A_GROUP]
            alone = list(_run_all(framework, some, 1, folder, limit))
            yield from ((draw, outcome) for draw, outcome in alone if outcome.kind != "right")
            known = [draw for draw, outcome in alone if outcome.kind == "right"]
            for ranks, group in groupby(known, key=lambda draw: draw.ranks):
                yield from _run_all(framework, list(group), ranks, folder, limit)


def prepare(*frameworks: str) -> None:
    """Have processes start with the modules of these frameworks; no effect once one has started."""
    preload("dfa_megatron.attention", *(name for framework in frameworks for name in module_of(framework).PRELOADED))


def _run_all(
    framework: str, draws: Sequence[Draw], ranks: int, folder: str, limit: float
) -> Iterator[tuple[Draw, Outcome]]:
    """Yield the outcomes of these draws in order, from as many groups of processes as it takes."""
    while draws:
        done = _run_group(framework, draws, ranks, folder, limit)
        yield from done
        draws = draws[len(done) :]


def module_of(framework: str) -> ModuleType:
    """Return the module of a framework's steps, or of its full name."""
    return importlib.import_module(f"tests.fuzz.frameworks.{framework}_step" if framework in PACKAGES else framework)


def _run_group(
    framework: str, draws: Sequence[Draw], ranks: int, folder: str, limit: float
) -> list[tuple[Draw, Outcome]]:
    """Return the outcomes of these draws in order, up to the one that lost the group, if one did."""
    lost = ""
    reports = [Path(folder, f"{ranks}-{rank}") for rank in range(ranks)]
    for report in reports:
        report.unlink(missing_ok=True)
    try:
        run_ranks(ranks, _serve, framework, list(draws), folder, limit, timeout=60 + limit * len(draws))
    except AssertionError as error:
        lost = str(error)
    told = [_read(report) for report in reports]
    done: list[tuple[Draw, Outcome]] = []
    for draw in draws:
        known = [outcomes[draw.number] for outcomes in told if draw.number in outcomes]
        if len(known) < ranks or any(outcome.kind == "failed" for outcome in known):
            reasons = [outcome.reason for outcome in known if outcome.kind == "failed"] or [lost[-6000:]]
            reasons.sort(key=lambda reason: "onnection" in reason)  # what met a rank that had failed comes last
            kind = "hung" if f"exit code {HUNG}" in lost else "failed"
            where = "on one rank: " if ranks == 1 else ""
            return [*done, (draw, Outcome(draw.number, kind, where + reasons[0]))]
        done.append((draw, _of_all(draw, known)))
    return done


def _of_all(draw: Draw, known: Sequence[Outcome]) -> Outcome:
    """Return one outcome of all ranks: the same refusal on each, or the worst."""
    kinds = {(outcome.kind, outcome.reason) for outcome in known if outcome.kind == "refused"}
    if kinds and (len(kinds) > 1 or any(outcome.kind != "refused" for outcome in known)):
        said = "; ".join(f"rank {rank}: {o.kind} {o.reason}" for rank, o in enumerate(known))
        return Outcome(draw.number, "failed", f"ranks differ: {said}")
    return max(known, key=lambda outcome: outcome.worst)


def _read(report: Path) -> dict[int, Outcome]:
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return {outcome.number: outcome for outcome in (Outcome(**json.loads(line)) for line in lines)}


def _serve(rank: int, ranks: int, framework: str, draws: Sequence[Draw], folder: str, limit: float) -> None:
    """Run the draws on a rank in order, each outcome a line of a file, until one has lost the group."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # whoever sets the level of a logger later
    module = module_of(framework)
    with Path(folder, f"{ranks}-{rank}").open("w", encoding="utf-8", buffering=1) as report:
        for draw in draws:
            with within(limit, draw.line):
                outcome = attempt(module, draw, rank, ranks, folder)
                report.write(json.dumps(outcome.record()) + "\n")
                if outcome.kind == "failed":
                    raise RuntimeError(f"{draw.line} failed: {outcome.reason}")  # the others may be waiting
                dist.barrier()  # a refusal of one rank alone must not meet the next draw of another


def attempt(module: Any, draw: Draw, rank: int, ranks: int, folder: str) -> Outcome:
    """Run a draw on one rank and keep what it comes to, or over several and compare."""
    kept = Path(folder, f"{draw.number}.pt")
    try:
        if told := module.documented(draw):
            return Outcome(draw.number, "refused", told)
        found = module.step(draw, rank, ranks)
        if ranks == 1:
            torch.save({"loss": found.loss, "gradients": found.gradients}, kept)
            finite = all(gradient.isfinite().all() for gradient in found.gradients.values())
            return (
                Outcome(draw.number, "right")
                if finite
                else Outcome(draw.number, "refused", "no finite numbers on one rank")
            )
        return judge(draw, found, torch.load(kept, weights_only=True))
    except UnsupportedError as error:
        known = name_of(module.REFUSALS, draw, str(error))
        kind = "refused" if known and ranks > 1 else "failed"
        return Outcome(draw.number, kind, known or f"refused: {error}")
    except Exception:  # noqa: BLE001  # whatever it is, the run goes on and reports it
        return Outcome(draw.number, "failed", traceback.format_exc(limit=-8))
