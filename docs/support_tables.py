"""What works together and where it has been seen: the tables of support.md, from the results of test runs.

Tests name the cells that they stand for by a marker (tests/support/support_rows.py). support.json keeps their outcomes
by environment; later results replace earlier ones of the same cell in the same environment. A new row is written into
support_rows.json once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "support.json"
ROWS: dict[str, dict[str, list[str]]] = json.loads((DOCS / "support_rows.json").read_text(encoding="utf-8"))
REFUSAL = re.compile(r"^(Skipped: )?(reference|cpu|triton|aten|cudnn|flash\d): ")
ABSENT = re.compile(r"not installed|built without CUDA|no CUDA device|cannot be imported|needs \d+ CUDA|runs on")

Run = dict[str, Any]

KINDS = ("passed CPU", "passed GPU", "failed CPU", "failed GPU", "not run CPU", "not run GPU", "refused")
"""What can become of a test; the order of the counts in support.json."""

GRIDS = ("kernels", "schedules")
PLACES = {"runtime": "torch", "megatron": "megatron-core", "deepspeed": "deepspeed", "models": "transformers"}
"""Tables whose columns are where tests ran, with the package whose version is told."""


def read(lines: Iterable[str]) -> Run:
    """Reduce one file of `pytest --support-report` to the cells of the page."""
    environment, *results = [json.loads(line) for line in lines]
    tests: dict[str, dict[str, Any]] = {}
    for result in results:
        if tests.get(result["id"], {}).get("outcome") != "failed":  # in its clean-up, for example
            tests[result["id"]] = result
    totals: dict[str, list[int]] = {}
    cells: dict[str, list[int]] = {}
    for test, result in tests.items():
        folder = test.split("::")[0].removeprefix("tests/").split("/")[0]
        total = totals.setdefault(folder.removesuffix(".py"), [0, 0, 0])
        total[("passed", "failed", "skipped").index(result["outcome"])] += 1
        for name in result.get("support", ()):
            cells.setdefault(name, [0] * len(KINDS))[KINDS.index(became(result))] += 1
    command = environment.pop("command")
    return {**environment, "commands": [command], "tests": totals, "cells": cells}


def became(result: dict[str, Any]) -> str:
    """Return which of KINDS a result is."""
    where = "GPU" if result["gpu"] else "CPU"
    if result.get("refuses") and result["outcome"] == "passed":
        return "refused"
    if result["outcome"] != "skipped":
        return f"{result['outcome']} {where}"
    if REFUSAL.match(result["reason"]) and not ABSENT.search(result["reason"]):
        return "refused"
    return f"not run {where}"


def merge(runs: list[Run], new: Run) -> list[Run]:
    """The runs with a new one; one of the same environment is brought up to date where the new one has results."""
    same = [r for r in runs if all(r[key] == new[key] for key in ("device", "python", "versions"))]
    for old in same:
        ran = {name: counts for name, counts in new["cells"].items() if sum(counts[:4])}
        new["cells"] = {**new["cells"], **old["cells"], **ran}
        larger = {name: total for name, total in old["tests"].items() if sum(total) > sum(new["tests"].get(name, []))}
        new["tests"] |= larger  # of a part of a folder's tests the counts would say less
        new["commands"] = [c for c in old["commands"] if c not in new["commands"]] + new["commands"]
    kept = [r for r in runs if r not in same] + [new]
    return sorted(kept, key=lambda r: (r["device"] != "CPU", r["device"], r["date"], json.dumps(r["versions"])))


def device_name(device: str) -> str:
    """Return a device's name as tables have it: 2 x H100."""
    return device.replace("NVIDIA ", "").removesuffix(" 80GB HBM3")


def count(runs: list[Run], name: str, kind: str) -> int:
    """How many tests became so, over all runs."""
    at = KINDS.index(kind)
    return sum(run["cells"].get(name, [0] * len(KINDS))[at] for run in runs)


def seen(runs: list[Run], name: str, where: str, package: str = "") -> str:
    """Where the tests of a name passed on a CPU or a GPU: versions of the package, or devices."""
    if count(runs, name, f"failed {where}"):
        return "**failed**"
    passed = [run for run in runs if count([run], name, f"passed {where}")]
    if where == "GPU" and passed:
        return ", ".join(sorted({f"{device_name(run['device'])} ({run['date']})" for run in passed}))
    if passed:
        versions = {run["versions"].get(package, "?").split("+")[0] for run in passed}
        return ", ".join(sorted(versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)]))
    unknown = where == "CPU" and not any(count(runs, name, kind) for kind in KINDS)
    return "not run" if unknown or count(runs, name, f"not run {where}") else ""


def cell(runs: list[Run], name: str) -> str:
    """A cell of a table whose columns are no places."""
    if not any(count(runs, name, kind) for kind in KINDS):
        return ""
    words = [where for where in ("CPU", "GPU") if count(runs, name, f"passed {where}")]
    if count(runs, name, "failed CPU") or count(runs, name, "failed GPU"):
        return "**failed**"
    if not words and not count(runs, name, "not run GPU"):
        return "refused" if count(runs, name, "refused") else "not run"
    return " ".join(words) or "GPU: not run"


def known() -> set[str]:
    """Return every cell of the tables."""
    found = {f"{table} | {row} | " for table in PLACES for row in ROWS[table]["rows"]}
    for table in GRIDS:
        found |= {f"{table} | {row} | {column}" for row in ROWS[table]["rows"] for column in ROWS[table]["columns"]}
    return found


def results() -> list[Run]:
    """Return the runs of support.json."""
    found: list[Run] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def table(name: str) -> list[str]:
    """Return the lines of a table."""
    runs, columns = results(), ROWS[name]["columns"]
    out = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in ROWS[name]["rows"]:
        if name in GRIDS:
            cells = [cell(runs, f"{name} | {row} | {column}") for column in columns]
        else:
            test = f"{name} | {row} | "
            cells = [seen(runs, test, "CPU", PLACES[name]), seen(runs, test, "GPU")]
        out.append(f"| {row} | {' | '.join(cells)} |")
    return out


def environments() -> list[str]:
    """Where tests ran, and how many passed; a skipped one says why when it is run."""
    out = ["| device | Python | packages | date | passed, skipped |", "|---|---|---|---|---|"]
    for run in results():
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        counts = []
        for folder, (passed, failed, skipped) in sorted(run["tests"].items()):
            counts.append(f"{folder} {passed}, {skipped}" + (f", **{failed} failed**" if failed else ""))
        out.append(f"| {run['device']} | {run['python']} | {versions} | {run['date']} | {'; '.join(counts)} |")
    return out


def take_in(lines: Iterable[str]) -> None:
    """Add the results of one file of `pytest --support-report` to support.json; rows that no table has any more go.

    Raises:
        ValueError: no table has a row of the file.
    """
    new, cells = read(lines), known()
    if strangers := sorted(new["cells"].keys() - cells):
        raise ValueError(f"no table of support_rows.json has {strangers}")
    runs = merge(results(), new)
    for run in runs:
        run["cells"] = {name: counts for name, counts in sorted(run["cells"].items()) if name in cells}
    RESULTS.write_text("[\n" + ",\n".join(_lines(run) for run in runs) + "\n]\n", encoding="utf-8")


def _lines(run: Run) -> str:
    """JSON with a line for each cell."""
    cells = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in run["cells"].items())
    head = json.dumps({key: value for key, value in run.items() if key != "cells"})
    return f'{head[:-1]},\n "cells": {{\n  {cells}\n }}}}'


TABLES = {name: partial(table, name) for name in ROWS} | {"environments": environments}
