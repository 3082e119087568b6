"""Cases over real ranks: processes that stay for many cases, and a new group of them after one that was lost."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from tests.fuzz.attempt import Verdict, attempt
from tests.fuzz.deadline import within
from tests.fuzz.random_case import Case
from tests.support.workers import preload, run_ranks

CASES_OF_A_GROUP = 200
"""Cases that one group of processes runs, unless one of them loses it."""


def run_groups(cases: Sequence[Case], limit: float, deadline: float) -> Iterator[tuple[Case, Verdict]]:
    """Every case over as many ranks as it asks for.

    Args:
        limit: seconds for a case.
        deadline: on the monotonic clock, after which no new group starts.
    """
    preload("tests.fuzz.attempt")
    by_ranks: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_ranks[case.ranks].append(case)
    for left in by_ranks.values():
        while left and time.monotonic() < deadline:
            done = _run_group(left[:CASES_OF_A_GROUP], limit)
            yield from done
            del left[: len(done)]


def _run_group(cases: Sequence[Case], limit: float) -> list[tuple[Case, Verdict]]:
    """Return the verdicts of these cases in order, up to the one that lost the group, if one did."""
    ranks, cuda, lost = cases[0].ranks, cases[0].device != "cpu", ""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            timeout = 120 + limit * len(cases)
            run_ranks(ranks, _serve, list(cases), folder, limit, timeout=timeout, cuda=cuda)
        except AssertionError as error:
            lost = str(error)
        told = [_read(Path(folder, f"rank-{rank}")) for rank in range(ranks)]
    done: list[tuple[Case, Verdict]] = []
    for case in cases:
        verdicts = [known[case.number] for known in told if case.number in known]
        if len(verdicts) < ranks or any("lost the group" in v.reason for v in verdicts):
            reasons = [v.reason for v in verdicts if v.kind == "failed"]
            why = "\n".join([*reasons, f"not every rank came to its end: {lost[:6000]}"])
            return [*done, (case, Verdict(case.number, "failed", why))]
        done.append((case, _of_all(case, verdicts)))
    return done


def _of_all(case: Case, verdicts: list[Verdict]) -> Verdict:
    """Return one verdict of all ranks: the same refusal on each, or the worst."""
    failed = [f"rank {rank}: {v.reason}" for rank, v in enumerate(verdicts) if v.kind == "failed"]
    if failed:
        return Verdict(case.number, "failed", "\n".join(failed))
    if len({(v.kind, v.reason) for v in verdicts}) > 1:
        return Verdict(case.number, "failed", f"ranks differ: {[f'{v.kind} {v.reason}' for v in verdicts]}")
    return max(verdicts, key=lambda v: v.worst)


def _read(path: Path) -> dict[int, Verdict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Verdict(**json.loads(line)) for line in lines]
    return {verdict.number: verdict for verdict in found}


def _serve(rank: int, ranks: int, cases: list[Case], folder: str, limit: float) -> None:
    """Run the cases on a rank in order, each verdict a line of a file, until one has lost the group."""
    logging.getLogger("dfa_megatron").setLevel(logging.ERROR)  # a line for each kernel that is chosen
    with Path(folder, f"rank-{rank}").open("w", encoding="utf-8", buffering=1) as report:
        for case in cases:
            with within(limit, case.line):
                verdict = attempt(case, rank, dist.group.WORLD)
            report.write(json.dumps(verdict.record()) + "\n")
            if verdict.kind == "failed" and not verdict.distances and not verdict.reason.startswith("refused"):
                raise RuntimeError(f"{case.line} failed: {verdict.reason}")  # the others may be waiting
