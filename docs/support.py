"""What works together, where it has been seen, and what became of injected faults, from the results of test runs.

Tests name the cells that they stand for by a marker (tests/support/support_rows.py). support.json keeps their outcomes
by environment; later results replace earlier ones of the same cell in the same environment. A new row is written into
support_rows.json once. trust.json has the latest result of each test of a fault; a test that failed is not taken in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from docs.measured import Lines, stored, table

DOCS = Path(__file__).parent
RESULTS, FAULTS = DOCS / "support.json", DOCS / "trust.json"
ROWS: dict[str, dict[str, list[str]]] = stored("support_rows.json")
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
    skipped = result["outcome"] == "skipped"
    if skipped and REFUSAL.match(result["reason"]) and not ABSENT.search(result["reason"]):
        return "refused"
    if result.get("refuses") and result["outcome"] == "passed":
        return "refused"
    return f"not run {where}" if skipped else f"{result['outcome']} {where}"


def merge(runs: list[Run], new: Run) -> list[Run]:
    """Return the runs with a new one, which replaces the results that one of the same environment had."""
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


def count(runs: list[Run], name: str, *kinds: str) -> int:
    """Return how many tests became one of these, over all runs."""
    return sum(run["cells"].get(name, [0] * len(KINDS))[KINDS.index(kind)] for run in runs for kind in kinds)


def seen(runs: list[Run], name: str, where: str, package: str = "") -> str:
    """Return where the tests of a name passed on a CPU or a GPU: versions of the package, or devices."""
    if count(runs, name, f"failed {where}"):
        return "**failed**"
    passed = [run for run in runs if count([run], name, f"passed {where}")]
    if where == "GPU" and passed:
        return ", ".join(sorted({f"{device_name(run['device'])} ({run['date']})" for run in passed}))
    if passed:
        versions = {run["versions"].get(package, "?").split("+")[0] for run in passed}
        return ", ".join(sorted(versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)]))
    unknown = where == "CPU" and not count(runs, name, *KINDS)
    return "not run" if unknown or count(runs, name, f"not run {where}") else ""


def cell(runs: list[Run], name: str) -> str:
    """Return a cell of a table whose columns are no places."""
    if count(runs, name, "failed CPU", "failed GPU"):
        return "**failed**"
    words = [where for where in ("CPU", "GPU") if count(runs, name, f"passed {where}")]
    if words or not count(runs, name, *KINDS):
        return " ".join(words)
    if count(runs, name, "not run GPU"):
        return "GPU: not run"
    return "refused" if count(runs, name, "refused") else "not run"


def known() -> set[str]:
    """Return every cell of the tables."""
    columns = {name: ROWS[name]["columns"] if name in GRIDS else [""] for name in (*GRIDS, *PLACES)}
    return {f"{name} | {row} | {one}" for name, heads in columns.items() for row in ROWS[name]["rows"] for one in heads}


def results() -> list[Run]:
    """Return the runs of support.json."""
    found: list[Run] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def support(name: str) -> Lines:
    """Return a table of what works together."""
    runs, columns, lines = results(), ROWS[name]["columns"], []
    for row in ROWS[name]["rows"]:
        test = f"{name} | {row} | "
        if name in GRIDS:
            lines.append([row, *(cell(runs, test + column) for column in columns)])
        else:
            lines.append([row, seen(runs, test, "CPU", PLACES[name]), seen(runs, test, "GPU")])
    return table(["", *columns], lines)


def environments() -> Lines:
    """Return where tests ran, and how many passed; a skipped one says why when it is run."""
    lines = []
    for run in results():
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        counts = "; ".join(
            f"{folder} {passed}, {skipped}" + (f", **{failed} failed**" if failed else "")
            for folder, (passed, failed, skipped) in sorted(run["tests"].items())
        )
        lines.append([run["device"], run["python"], versions, run["date"], counts])
    return table(["device", "Python", "packages", "date", "passed, skipped"], lines)


def take_in(lines: Iterable[str]) -> None:
    """Add the results of one file of `pytest --support-report`; rows that no table has any more go.

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


def take_in_faults(lines: Iterable[str]) -> None:
    """Add the results of the same file to trust.json."""
    found = stored("trust.json") | read_faults(lines)
    text = ",\n".join(f"{json.dumps(test)}: {json.dumps(found[test])}" for test in sorted(found))
    FAULTS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(run: Run) -> str:
    """Return JSON with a line for each cell."""
    cells = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in run["cells"].items())
    head = json.dumps({key: value for key, value in run.items() if key != "cells"})
    return f'{head[:-1]},\n "cells": {{\n  {cells}\n }}}}'


def read_faults(lines: Iterable[str]) -> dict[str, Run]:
    """Return the results of tests of faults in one file of `pytest --support-report`, by test."""
    environment, *results = [json.loads(line) for line in lines]
    about = {"device": environment["device"], "torch": environment["versions"]["torch"], "date": environment["date"]}
    passed = [result for result in results if result["outcome"] == "passed" and "fault" in result]
    return {result["id"]: {**result["fault"], **about} for result in passed}


def fault_table(results: list[Run]) -> Lines:
    """Return a line for each fault; what differs among its results stands side by side."""
    rows: dict[object, list[Run]] = {}
    for result in results:
        short = (result["fault"], result["device"] == "CPU") if result["seconds"] is not None else result["happens"]
        rows.setdefault(short, []).append(result)
    lines = []
    for those in rows.values():
        keys = ("fault", "where", "happens")
        injected, places, endings = ("; ".join(dict.fromkeys(r[key] for r in those)) for key in keys)
        endings = re.sub(r": (an accident|out of memory)[^;]* test", " with the injected error's text", endings)
        times = [r["seconds"] for r in those if r["seconds"] is not None]
        on = {r["transport"] + ("" if r["device"] == "CPU" else f" ({device_name(r['device'])})") for r in those}
        ended = f"{max(0.1, *times):.1f} s" if times else ""
        lines.append([injected, places, endings, ended, ", ".join(sorted(on))])
    runs = {f"{device_name(r['device'])}, PyTorch {r['torch'].split('+')[0]}, {r['date']}" for r in results}
    made = table(["injected", "where", "what happens", "after at most", "seen on"], lines)
    return [*made, "", f"{len(results)} tests; {'; '.join(sorted(runs))}."]


PAGES = {
    "support": {name: partial(support, name) for name in ROWS} | {"environments": environments},
    "trust": {"faults": lambda: fault_table([*stored("trust.json").values()])},
}
