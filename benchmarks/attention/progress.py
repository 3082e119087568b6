"""What a benchmark says while it runs: a bar with the time left where someone watches, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.attention.rows import Row


class Progress:
    """Lines on standard output, one per row, and under them a bar if that is a terminal and rich is installed."""

    def __init__(self, cells: int) -> None:
        self.cells, self.done, self.began = cells, 0, time.monotonic()
        self._bar = _bar(cells) if sys.stdout.isatty() else None
        if self._bar is not None:
            self._bar.start()

    def advance(self, rows: Sequence[Row], seconds_left: float) -> None:
        """A cell is done; `seconds_left` is a guess for all that are left."""
        self.done += 1
        for row in rows:
            self.say(line(row))
        left = f"about {seconds_left:.0f} s left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, left=left)
        else:
            spent = time.monotonic() - self.began
            self.say(f"[{self.done}/{self.cells}] {spent:.0f} s, {left}")

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def line(row: Row) -> str:
    """A row in one line."""
    what = f"{short(row.seq_length):>5} {row.heads}:{row.kv_heads}x{row.head_dim} {row.mask:6} {row.method:34}"
    if row.state != "timed":
        return f"{what} {row.state}: {row.why}"
    times = [
        f"{name} {ms:.3f} ms {tflops:.4g} TFLOP/s"
        for name, ms, tflops in (
            ("forward", row.forward_ms, row.forward_tflops),
            ("both", row.both_ms, row.both_tflops),
        )
        if ms
    ]
    checked = f"error {row.error:.0e}" if row.error else row.note
    return f"{what} {', '.join(times)}, peak {row.peak_gib:.2f} GiB, {checked}"


def short(length: int) -> str:
    """131072 as 128K."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _bar(cells: int) -> Any:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    bar = Bar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    bar.add_task("cells", total=cells, left="")
    return bar
