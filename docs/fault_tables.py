"""What became of injected faults: the tables of trust.md, from trust.json.

A later result of a test replaces the earlier one. A test that failed is not taken in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docs import raw_results
from docs.support_tables import device_name

DOCS = Path(__file__).parent
RESULTS = DOCS / "trust.json"
HEAD = ("injected", "where", "on rank", "what happens", "after at most", "seen on")

Result = dict[str, Any]


def read(lines: Iterable[str]) -> dict[str, Result]:
    """The results of one file of `pytest --support-report`, by test."""
    environment, *results = [json.loads(line) for line in lines]
    about = {"device": environment["device"], "torch": environment["versions"]["torch"], "date": environment["date"]}
    return {
        result["id"]: {**result["fault"], **about}
        for result in results
        if result["outcome"] == "passed" and "fault" in result
    }


def results() -> dict[str, Result]:
    """Return the results of trust.json, by test."""
    found: dict[str, Result] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def table(results: dict[str, Result], whole: bool) -> list[str]:
    """Return a table. What differs among the results of a line stands side by side."""
    rows: dict[object, list[Result]] = {}
    for result in results.values():
        fault, happens = result["fault"], result["happens"]
        short = happens if result["seconds"] is None else (fault, result["device"] == "CPU")
        rows.setdefault((fault, result["where"], happens) if whole else short, []).append(result)
    head, *lines = [[*line[:2], *line[2 + (not whole) :]] for line in (HEAD, *map(_line, rows.values()))]
    runs = sorted(
        {f"{device_name(r['device'])}, PyTorch {r['torch'].split('+')[0]}, {r['date']}" for r in results.values()}
    )
    return [*raw_results.table(head, lines), "", f"{len(results)} tests; {'; '.join(runs)}."]


def _line(those: list[Result]) -> list[str]:
    ranks = ", ".join(sorted({str(r["rank"]) for r in those if r["rank"] is not None})) or "all"
    faults, wheres, endings = ("; ".join(dict.fromkeys(r[key] for r in those)) for key in ("fault", "where", "happens"))
    times = [r["seconds"] for r in those if r["seconds"] is not None]
    places = sorted({f"{r['transport']}{_device(r['device'])}" for r in those})
    endings = re.sub(r": (an accident|out of memory)[^;]* test", " with the injected error's text", endings)
    return [faults, wheres, ranks, endings, f"{max(0.1, *times):.1f} s" if times else "", ", ".join(places)]


def take_in(lines: Iterable[str]) -> None:
    """Add the results of one file of `pytest --support-report` to trust.json."""
    found = results() | read(lines)
    text = ",\n".join(f"{json.dumps(test)}: {json.dumps(found[test])}" for test in sorted(found))
    RESULTS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _device(name: str) -> str:
    return "" if name == "CPU" else f" ({device_name(name)})"


TABLES = {
    "faults": lambda: table(results(), whole=False),
    "every-fault": lambda: table(results(), whole=True),
}
"""One line for each fault, its places and endings side by side; one for each fault, place and ending."""
