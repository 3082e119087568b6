"""Write support.md from the results of test runs: what works together, and where it has been seen.

    python -m pytest tests/kernels --support-report kernels.jsonl     # on any machine, any part of the tests
    python docs/update_support.py kernels.jsonl ...                   # take them into support.json and write the page
    python docs/update_support.py                                     # write the page alone

The rows of support_rows.py say which tests a cell stands for. support.json keeps, for each environment in which tests
ran, what became of these; results that come later replace earlier ones of the same tests in the same environment.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "support.json"
REFUSAL = re.compile(r"^(Skipped: )?(reference|cpu|triton|aten|cudnn|flash\d): ")
ABSENT = re.compile(r"not installed|built without CUDA|no CUDA device|cannot be imported|needs \d+ CUDA|runs on")

Run = dict[str, Any]

_spec = importlib.util.spec_from_file_location("support_rows", DOCS / "support_rows.py")
assert _spec is not None
assert _spec.loader is not None
rows = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rows)


def selected(pattern: str, ids: Iterable[str]) -> list[str]:
    """The tests that a pattern of support_rows.py stands for."""
    found = re.compile("tests/" + pattern)
    return [test for test in ids if found.match(test)]


def read(lines: Iterable[str]) -> Run:
    """One file of `pytest --support-report`, reduced to the cells of the page."""
    environment, *results = [json.loads(line) for line in lines]
    tests: dict[str, dict[str, Any]] = {}
    for result in results:
        if tests.get(result["id"], {}).get("outcome") != "failed":  # in its clean-up, for example
            tests[result["id"]] = result
    totals: dict[str, list[int]] = {}
    for test, result in tests.items():
        folder = test.split("::")[0].removeprefix("tests/").split("/")[0]
        total = totals.setdefault(folder.removesuffix(".py"), [0, 0, 0])
        total[("passed", "failed", "skipped").index(result["outcome"])] += 1
    cells = {}
    for pattern in rows.patterns():
        if found := selected(pattern, tests):
            cells[pattern] = [sum(became(tests[test]) == kind for test in found) for kind in rows.KINDS]
    command = environment.pop("command")
    return {**environment, "commands": [command], "tests": totals, "cells": cells}


def became(result: dict[str, Any]) -> str:
    """Which of rows.KINDS a result is."""
    where = "GPU" if result["gpu"] else "CPU"
    if result["outcome"] != "skipped":
        return f"{result['outcome']} {where}"
    if REFUSAL.match(result["reason"]) and not ABSENT.search(result["reason"]):
        return "refused"
    return f"not run {where}"


def merge(runs: list[Run], new: Run) -> list[Run]:
    """The runs with a new one; one of the same environment is brought up to date where the new one has results."""
    same = [r for r in runs if all(r[key] == new[key] for key in ("device", "python", "versions"))]
    for old in same:
        ran = {pattern: counts for pattern, counts in new["cells"].items() if sum(counts[:4])}
        new["cells"] = {**new["cells"], **old["cells"], **ran}
        larger = {name: total for name, total in old["tests"].items() if sum(total) > sum(new["tests"].get(name, []))}
        new["tests"] |= larger  # of a part of a folder's tests the counts would say less
        new["commands"] = [c for c in old["commands"] if c not in new["commands"]] + new["commands"]
    kept = [r for r in runs if r not in same] + [new]
    return sorted(kept, key=lambda r: (r["device"] != "CPU", r["device"], r["date"], json.dumps(r["versions"])))


def count(runs: list[Run], pattern: str, kind: str) -> int:
    """How many tests became so, over all runs."""
    at = rows.KINDS.index(kind)
    return sum(run["cells"].get(pattern, [0] * len(rows.KINDS))[at] for run in runs)


def seen(runs: list[Run], pattern: str, where: str, package: str = "") -> str:
    """Where the tests of a pattern passed on a CPU or a GPU: versions of the package, or devices."""
    if count(runs, pattern, f"failed {where}"):
        return "**failed**"
    passed = [run for run in runs if count([run], pattern, f"passed {where}")]
    if where == "GPU" and passed:
        return ", ".join(sorted({f"{run['device'].replace('NVIDIA ', '')} ({run['date']})" for run in passed}))
    if passed:
        versions = {run["versions"].get(package, "?").split("+")[0] for run in passed}
        return ", ".join(sorted(versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)]))
    unknown = where == "CPU" and not any(count(runs, pattern, kind) for kind in rows.KINDS)
    return "not run" if unknown or count(runs, pattern, f"not run {where}") else ""


def cell(runs: list[Run], pattern: str) -> str:
    """A cell of a table whose columns are no places."""
    if not pattern:
        return ""
    words = [where for where in ("CPU", "GPU") if count(runs, pattern, f"passed {where}")]
    if count(runs, pattern, "failed CPU") or count(runs, pattern, "failed GPU"):
        return "**failed**"
    if pattern in rows.REFUSES and words:
        return "refused"
    if not words and not count(runs, pattern, "not run GPU"):
        return "refused" if count(runs, pattern, "refused") else "not run"
    return " ".join(words) or "GPU: not run"


def grid(runs: list[Run], columns: Iterable[str], lines: dict[str, list[str]]) -> list[str]:
    """A table of cells."""
    columns = list(columns)
    out = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return out + [f"| {name} | {' | '.join(cell(runs, p) for p in patterns)} |" for name, patterns in lines.items()]


def places(runs: list[Run], package: str, lines: dict[str, str]) -> list[str]:
    """A table whose columns are where tests passed."""
    out = [f"| | CPU, with {package} | GPU |", "|---|---|---|"]
    return out + [f"| {name} | {seen(runs, p, 'CPU', package)} | {seen(runs, p, 'GPU')} |" for name, p in lines.items()]


def environments(runs: list[Run]) -> list[str]:
    """Where tests ran, and how many passed; a skipped one says why when it is run."""
    out = ["| device | Python | packages | date | passed, skipped |", "|---|---|---|---|---|"]
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        counts = []
        for folder, (passed, failed, skipped) in sorted(run["tests"].items()):
            counts.append(f"{folder} {passed}, {skipped}" + (f", **{failed} failed**" if failed else ""))
        out.append(f"| {run['device']} | {run['python']} | {versions} | {run['date']} | {'; '.join(counts)} |")
    return out


def page(text: str, runs: list[Run]) -> str:
    """The page with its generated parts made anew."""
    parts = {"environments": environments(runs)}
    parts |= {name: grid(runs, *table) for name, table in rows.GRIDS.items()}
    parts |= {name: places(runs, *table) for name, table in rows.PLACES.items()}
    for part, lines in parts.items():
        start, end = f"<!-- {part} -->\n", f"<!-- /{part} -->"
        before, rest = text.split(start)
        text = before + start + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    return text


def main(files: list[str]) -> None:
    """Take in the files, and write."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    known = set(rows.patterns())
    for file in files:
        runs = merge(runs, read(Path(file).read_text(encoding="utf-8").splitlines()))
    for run in runs:
        run["cells"] = {pattern: counts for pattern, counts in sorted(run["cells"].items()) if pattern in known}
    RESULTS.write_text("[\n" + ",\n".join(_lines(run) for run in runs) + "\n]\n", encoding="utf-8")
    target = DOCS / "support.md"
    target.write_text(page(target.read_text(encoding="utf-8"), runs), encoding="utf-8")


def _lines(run: Run) -> str:
    """JSON with a line for each cell."""
    cells = ",\n  ".join(f"{json.dumps(pattern)}: {json.dumps(counts)}" for pattern, counts in run["cells"].items())
    head = json.dumps({key: value for key, value in run.items() if key != "cells"})
    return f'{head[:-1]},\n "cells": {{\n  {cells}\n }}}}'


if __name__ == "__main__":
    main(sys.argv[1:])
