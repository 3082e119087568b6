"""Tables out of the files of `benchmarks/results`.

A cell is the one row of a file whose fields have the given values. Two such rows, or none, are an error unless a table
says what stands in their place. The fastest cell of a column is bold. "cannot" stands for a method that refuses
the shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
K = 1024
NAMES = re.compile(r"{(\w+)")  # of the fields of a format
Line = list[str]
Lines = list[str]
Fields = tuple[str, Mapping[str, object], str]
"""A column of other figures: the file, values of fields, and a format of the row."""


@cache
def results(name: str) -> list[dict[str, Any]]:
    """Return the rows of a raw file, named without its year, as `11-22-4xh200-packed`."""
    file = json.loads((RESULTS / f"2026-{name}.json").read_text(encoding="utf-8"))
    return [one for key in ("rows", "results", "layers", "training") for one in file.get(key, [])]


def row(name: str, **where: object) -> dict[str, Any]:
    """Return the one row of a file with these values.

    Raises:
        LookupError: no row or several rows have them.
    """
    found = matching(name, where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name} have {where}")
    return found[0]


def matching(name: str, where: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the rows of a file with these values."""
    return [one for one in results(name) if all(one.get(key) == value for key, value in where.items())]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Lines:
    """Return a Markdown table."""
    first, *rest = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return [first, "|---" * len(head) + "|", *rest]


def bold(lines: Sequence[Line], best: Callable[..., float] = max) -> list[Line]:
    """Mark the best number of each column but the first, and every cell that shows the same."""
    out = [list(line) for line in lines]
    for column in range(1, len(out[0])):
        cells = {at: line[column].replace(",", "") for at, line in enumerate(out) if line[column][:1].isdigit()}
        marked = best(map(float, cells.values()), default=0)
        for at, cell in cells.items():
            if float(cell) == marked:
                out[at][column] = f"**{out[at][column]}**"
    return out


def figures(
    corner: str, lines: Mapping[str, Mapping[str, object]], columns: Mapping[str, Fields], absent: str = ""
) -> Lines:
    """Return a table of formatted rows; `absent` stands for a row or a field that a file lacks."""

    def cell(where: Mapping[str, object], column: Fields) -> str:
        name, more, shown = column
        where = {**where, **more}
        if absent and not matching(name, where):
            return absent
        fields = {key.replace(" ", "_"): value for key, value in row(name, **where).items()}
        return absent if absent and not all(name in fields for name in NAMES.findall(shown)) else shown.format(**fields)

    return table(
        [corner, *columns],
        [[label, *(cell(where, column) for column in columns.values())] for label, where in lines.items()],
    )
