"""Run types over real ranks: processes that stay for several types, and new ones after one that failed."""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.huggingface.sweep.attempt import Verdict, attempt
from tests.huggingface.sweep.tiny import NOT_RUN
from tests.support.workers import preload, run_ranks

TYPES_OF_A_GROUP = 16
LIMIT = 30.0
"""Seconds that a type may take on average."""


def sweep(kinds: Sequence[str], ranks: int) -> Iterator[tuple[str, list[Verdict]]]:
    """Yield each type with the verdict of each section, the same on all ranks."""
    preload("tests.huggingface.sweep.attempt", "transformers")
    left = [kind for kind in kinds if kind not in NOT_RUN]
    yield from ((kind, [Verdict(kind, "not run", "plain", NOT_RUN[kind])]) for kind in kinds if kind in NOT_RUN)
    while left:
        done = list(_run_group(left[:TYPES_OF_A_GROUP], ranks))
        yield from done
        del left[: len(done)]


def _run_group(kinds: Sequence[str], ranks: int) -> Iterator[tuple[str, list[Verdict]]]:
    """Yield these types in order, up to the one that lost the group, if one did."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        lost = ""
        try:
            run_ranks(ranks, serve, list(kinds), folder, timeout=LIMIT * len(kinds))
        except AssertionError as error:
            lost = str(error)
        told = [_read(Path(folder, f"rank-{rank}")) for rank in range(ranks)]
    for kind in kinds:
        found = [known.get(kind, []) for known in told]
        crashes = [v for verdicts in found for v in verdicts if v.state == "crash"]
        if crashes or not all(found):
            yield kind, crashes[:1] or [Verdict(kind, "crash", "plain", lost)]
            return
        if len({json.dumps([(v.state, v.section, v.reason) for v in verdicts]) for verdicts in found}) > 1:
            found[0] = [Verdict(kind, "wrong", "plain", f"the ranks say different things: {found}")]
        yield kind, found[0]


def serve(rank: int, ranks: int, kinds: Sequence[str], folder: str) -> None:
    """Run the types on a rank in order, each verdict a line of a file, until one has lost the group.

    Raises:
        RuntimeError: it has; the other ranks may be waiting.
    """
    import transformers

    warnings.simplefilter("ignore")
    logging.getLogger("dfa_megatron").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    with Path(folder, f"rank-{rank}").open("w", encoding="utf-8", buffering=1) as report:
        for kind in kinds:
            began = time.monotonic()
            verdicts = attempt(kind)
            seconds = round(time.monotonic() - began, 1)
            for verdict in verdicts:
                report.write(json.dumps(verdict.record() | {"seconds": seconds}) + "\n")
            if any(verdict.state == "crash" for verdict in verdicts):
                raise RuntimeError(f"{kind}: {verdicts[-1].reason}")


def _read(path: Path) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        values: dict[str, Any] = json.loads(line)
        del values["seconds"]
        found.setdefault(values["kind"], []).append(Verdict(**values))
    return found
