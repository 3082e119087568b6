"""The tables of a benchmark: a line per method, a column per length, the best marked, ours against the others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.attention.job import PASSES
from benchmarks.attention.progress import short
from benchmarks.attention.rows import Row

BEST = "*"


@dataclass(frozen=True, slots=True)
class Table:
    """Text in cells; `best` are the (line, column) of the marked ones."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for every attention, whatever its length."""
    shapes = dict.fromkeys(row.shape for row in rows)
    return [_table([row for row in rows if row.shape == shape]) for shape in shapes]


def show(table: Table) -> None:
    """Print it, the best in colour where rich is installed and someone watches."""
    text = text_of(table)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            coloured = Text(text)
            coloured.highlight_regex(r"\S+ \(\S+\)\*", "bold green")
            Console().print(coloured, soft_wrap=True)
            return
    print(text, flush=True)


def text_of(table: Table) -> str:
    """The table in plain characters."""
    everything = (table.head, *table.lines)
    widths = [max(len(cells[column]) for cells in everything) for column in range(len(table.head))]
    lines = [table.title]
    for cells in everything:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  ".join((first, *rest)).rstrip())
    return "\n".join((*lines, *table.notes)) + "\n"


def best(rows: Sequence[Row], *kinds: str) -> float:
    """The most TFLOP/s of forward and backward (of a forward, if only that was timed) of the methods of some kinds."""
    return max((_speed(row) for row in rows if row.kind in kinds and row.state == "timed"), default=0.0)


def _speed(row: Row) -> float:
    return row.both_tflops or row.forward_tflops


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    lengths = sorted({row.seq_length for row in rows})
    cell_rows = {length: [row for row in rows if row.seq_length == length] for length in lengths}
    fastest = {length: best(cell_rows[length], "ours", "peer") for length in lengths}
    prefix, scale = ("G", 1e3) if max(map(_speed, rows)) < 1 else ("T", 1.0)
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = {row.seq_length: row for row in rows if row.method == method}
        cells = [_cell(mine[length], fastest[length], scale) if length in mine else "" for length in lengths]
        timed = [row for row in mine.values() if row.state == "timed"]
        memory = f"{timed[-1].peak_gib:.2f}" if timed and timed[-1].peak_gib > timed[-1].inputs_gib else ""
        host = f"{max(timed[0].forward_host_ms, timed[0].both_host_ms):.2f}" if timed else ""
        lines.append((method, *cells, memory, host))
    lines += _ratios(cell_rows)
    window = f" of {first.window}" if first.window else ""
    title = (
        f"{first.ranks} ranks, {first.heads} heads, {first.kv_heads} kv_heads of {first.head_dim}, "
        f"{first.mask}{window}, {first.dtype}: {prefix}FLOP/s per rank, forward and backward (forward alone)"
    )
    head = ("method", *(short(length) for length in lengths), "GiB", "host ms")
    return Table(title, head, tuple(lines), tuple(_notes(rows)))


def _cell(row: Row, fastest: float, scale: float) -> str:
    if row.state != "timed":
        return row.state
    values = {name: scale * getattr(row, f"{name}_tflops") for name in PASSES}
    both, forward = (f"{values[name]:.3g}" if values[name] else "-" for name in ("both", "forward"))
    mark = BEST if row.kind in ("ours", "peer") and _speed(row) == fastest else ""
    return f"{both} ({forward}){mark}"


def _ratios(cells: dict[int, list[Row]]) -> list[tuple[str, ...]]:
    """Our best against the others' best of each length."""
    lines = []
    for name, kind in (("ours / best peer", "peer"), ("ours / bare kernel", "kernel")):
        pairs = [(best(rows, "ours"), best(rows, kind)) for rows in cells.values()]
        if any(ours and theirs for ours, theirs in pairs):
            lines.append((name, *(f"{ours / theirs:.3f}" if ours and theirs else "" for ours, theirs in pairs), "", ""))
    return lines


def _notes(rows: Sequence[Row]) -> list[str]:
    """What is behind a word in a cell or a name, once each."""
    notes = [f"{BEST} the fastest; GiB: peak at the longest length; host ms: until the call returned, at the shortest"]
    said = dict.fromkeys(f"{row.method}: {row.note}" for row in rows if row.note and row.state == "timed")
    for method, took in dict.fromkeys((row.method, row.took) for row in rows if row.took):
        lengths = (short(row.seq_length) for row in rows if (row.method, row.took) == (method, took))
        said[f"{method}: took {took} at {', '.join(lengths)}"] = None
    said |= dict.fromkeys(f"{row.method}: {row.state}, {row.why}" for row in rows if row.state != "timed")
    return [*notes, *said]
