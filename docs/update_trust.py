"""Write trust.md's table from the results of the tests that inject faults.

    python -m pytest tests/faults tests/runtime/agreement/test_calls_gpu.py --support-report faults.jsonl
    python docs/update_trust.py faults.jsonl ...     # take them into trust.json and write the page
    python docs/update_trust.py                      # write the page alone

On GPUs it is the same command. A later result of a test replaces the earlier one; a test that failed is not taken in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "trust.json"

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


def table(results: dict[str, Result]) -> list[str]:
    """One line for each fault, place and ending; ranks, times and transports side by side."""
    rows: dict[tuple[str, str, str], list[Result]] = {}
    for result in results.values():
        rows.setdefault((result["fault"], result["where"], result["happens"]), []).append(result)
    out = ["| injected | where | on rank | what happens | after at most | seen on |", "|---|---|---|---|---|---|"]
    for (fault, where, happens), those in rows.items():
        ranks = ", ".join(sorted({str(r["rank"]) for r in those if r["rank"] is not None})) or "all"
        times = [r["seconds"] for r in those if r["seconds"] is not None]
        places = sorted({f"{r['transport']}{_device(r['device'])}" for r in those})
        after = f"{max(0.1, *times):.1f} s" if times else ""
        out.append(f"| {fault} | {where} | {ranks} | {happens} | {after} | {', '.join(places)} |")
    runs = sorted({f"{r['device']}, PyTorch {r['torch'].split('+')[0]}, {r['date']}" for r in results.values()})
    return [*out, "", f"{len(results)} tests; {'; '.join(runs)}."]


def _device(name: str) -> str:
    return "" if name == "CPU" else f" ({name.replace('NVIDIA ', '')})"


def page(text: str, results: dict[str, Result]) -> str:
    """The page with its table made anew."""
    start, end = "<!-- faults -->\n", "<!-- /faults -->"
    before, rest = text.split(start)
    return before + start + "\n".join(table(results)) + "\n" + end + rest.split(end)[1]


def main(files: list[str]) -> None:
    """Take in the files, and write."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for file in files:
        results |= read(Path(file).read_text(encoding="utf-8").splitlines())
    lines = ",\n".join(f"{json.dumps(test)}: {json.dumps(results[test])}" for test in sorted(results))
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    target = DOCS / "trust.md"
    target.write_text(page(target.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
