"""Report a benchmark: the fields of a row, a line for each, and a table per attention at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BEST = "*"


@dataclass(slots=True)
class Row:
    """One method on one attention at one length; times are medians over repetitions of the slowest rank.

    state: "timed"; "refused", "wrong", "out of memory", "failed" or "dropped", and `why` says more.
    forward_ms, both_ms: milliseconds of a forward alone, and of a forward and its backward. tflops: per rank.
    host_ms: until the call has returned to Python. Launches decide the time where the two are close.
    inputs_gib: q, k, v and dout of a rank. beyond_gib: the most that the method needs beside them at once, with out,
        dq, dk, dv and our transport's symmetric memory. peak_gib: both together. outside_gib: taken past PyTorch's
        allocator meanwhile.
    sent_mib: bytes that the busiest rank sends in a forward and its backward; counted for our methods only.
    took: the schedule that "auto" came to.
    error: the largest relative error of out, dq, dk and dv on a short sequence.
    times: every repetition, by pass.
    """

    method: str
    kind: str
    ranks: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    dtype: str
    seq_length: int
    state: str = ""
    why: str = ""
    note: str = ""
    took: str = ""
    error: float = 0.0
    forward_ms: float = 0.0
    both_ms: float = 0.0
    forward_tflops: float = 0.0
    both_tflops: float = 0.0
    forward_host_ms: float = 0.0
    both_host_ms: float = 0.0
    inputs_gib: float = 0.0
    beyond_gib: float = 0.0
    peak_gib: float = 0.0
    outside_gib: float = 0.0
    sent_mib: float = 0.0
    times: dict[str, list[float]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, str, str]:
        """Return a key that is equal for the rows of one table."""
        return self.heads, self.kv_heads, self.head_dim, self.mask, self.dtype

    @property
    def speed(self) -> float:
        """Return TFLOP/s of forward and backward, or of a forward if only that was timed."""
        return (self.both_tflops or self.forward_tflops) if self.state == "timed" else 0.0


def line(row: Row) -> str:
    """Return a row in one line."""
    what = f"{short(row.seq_length):>5} {row.heads}:{row.kv_heads}x{row.head_dim} {row.mask:6} {row.method:34}"
    if row.state != "timed":
        return f"{what} {row.state}: {row.why}"
    timed = (("forward", row.forward_ms, row.forward_tflops), ("both", row.both_ms, row.both_tflops))
    times = [f"{name} {ms:.3f} ms {tflops:.4g} TFLOP/s" for name, ms, tflops in timed if ms]
    checked = f"error {row.error:.0e}" if row.error else row.note
    return f"{what} {', '.join(times)}, peak {row.peak_gib:.2f} GiB, {checked}"


def short(length: int) -> str:
    """Return 131072 as 128K."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def tables(rows: Sequence[Row]) -> str:
    """Return a table for every attention: a line per method, a column per length, the fastest marked."""
    shapes = dict.fromkeys(row.shape for row in rows)
    return "\n".join(_table([row for row in rows if row.shape == shape]) for shape in shapes)


def _table(rows: Sequence[Row]) -> str:
    first = rows[0]
    columns = {
        length: [row for row in rows if row.seq_length == length] for length in sorted({r.seq_length for r in rows})
    }
    fastest = {length: _best(column, "ours", "baseline") for length, column in columns.items()}
    prefix, scale = ("G", 1e3) if max(row.speed for row in rows) < 1 else ("T", 1.0)
    lines = [["method", *map(short, columns), "GiB", "host ms"]]
    for method in dict.fromkeys(row.method for row in rows):
        mine = {row.seq_length: row for row in rows if row.method == method}
        cells = [_cell(mine.get(length), fastest[length], scale) for length in columns]
        timed = [row for row in mine.values() if row.state == "timed"]
        memory = f"{timed[-1].peak_gib:.2f}" if timed and timed[-1].peak_gib > timed[-1].inputs_gib else ""
        host = f"{max(timed[0].forward_host_ms, timed[0].both_host_ms):.2f}" if timed else ""
        lines.append([method, *cells, memory, host])
    for kind, name in (("baseline", "ours / best baseline"), ("kernel", "ours / bare kernel")):
        pairs = [(_best(column, "ours"), _best(column, kind)) for column in columns.values()]
        ratios = [f"{ours / theirs:.3f}" if ours and theirs else "" for ours, theirs in pairs]
        lines += [[name, *ratios, "", ""]] if any(ratios) else []
    title = (
        f"{first.ranks} ranks, {first.heads} heads, {first.kv_heads} kv_heads of {first.head_dim}, "
        f"{first.mask}, {first.dtype}: {prefix}FLOP/s per rank, forward and backward (forward alone)"
    )
    return "\n".join([title, *_aligned(lines), *_notes(rows), ""])


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:{'>' if at else '<'}{widths[at]}}" for at, cell in enumerate(cells)).rstrip()
        for cells in lines
    ]


def _best(rows: Iterable[Row], *kinds: str) -> float:
    return max((row.speed for row in rows if row.kind in kinds), default=0.0)


def _cell(row: Row | None, fastest: float, scale: float) -> str:
    if row is None or row.state != "timed":
        return "" if row is None else row.state
    both, forward = (f"{scale * speed:.3g}" if speed else "-" for speed in (row.both_tflops, row.forward_tflops))
    return f"{both} ({forward}){BEST if row.kind in ('ours', 'baseline') and row.speed == fastest else ''}"


def _notes(rows: Sequence[Row]) -> list[str]:
    """Explain each word in a cell or a name once."""
    notes = [f"{BEST} the fastest; GiB: peak at the longest length; host ms: until the call returned, at the shortest"]
    for row in rows:
        if row.state != "timed":
            notes.append(f"{row.method}: {row.state}, {row.why}")
        elif row.note:
            notes.append(f"{row.method}: {row.note}")
    for method, took in dict.fromkeys((row.method, row.took) for row in rows if row.took):
        lengths = (short(row.seq_length) for row in rows if (row.method, row.took) == (method, took))
        notes.append(f"{method}: took {took} at {', '.join(lengths)}")
    return list(dict.fromkeys(notes))
