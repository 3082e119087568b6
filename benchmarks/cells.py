"""Run a set of measurements, one after another, within a budget: `python -m benchmarks.cells paper --out runs/paper`.

    python -m benchmarks.cells --list                                    # every set and its cells
    python -m benchmarks.cells two-gpus --out runs/two --budget 1800
    python -m benchmarks.cells paper --out runs/paper --only paper-7b paper-33h

A set is a list of cells in order of worth. A cell that cannot run here is skipped with the reason. A cell whose time
would not end within the budget is not begun; shorter ones after it may be. A cell that runs over its time is ended with
all its processes. The folder gets `cells.jsonl`, a line after each cell, and each cell's output in `NAME.log`, beside
the files that the cell writes. The exit status is 1 if a cell failed or ran over its time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cell_sets import SETS, Cell

MARK = "DFA_MEGATRON_CELL"
"""An environment variable that all processes of a cell inherit, also those in sessions of their own."""

ROOT = Path(__file__).parents[1]
"""Where commands run; their modules are found there."""

GRACE = 10.0
"""Seconds in which a cell that was told to end may do so itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run or list the cells of a set; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", choices=tuple(SETS))
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="names of cells")
    parser.add_argument("--list", action="store_true", help="print the cells and run none")
    args = parser.parse_args(argv)
    if args.list:
        for name in [args.set] if args.set else SETS:
            print(f"{name}:")
            for cell in SETS[name]:
                print(f"  {cell.name:28} {cell.seconds:5.0f} s  {cell.text}")
        return 0
    if args.set is None or args.out is None:
        parser.error("name a set, and the folder of its results with --out")
    cells = SETS[args.set]
    unknown = set(args.only or ()) - {cell.name for cell in cells}
    if unknown:
        parser.error(f"{args.set} has no cell {', '.join(sorted(unknown))}")
    chosen = [cell for cell in cells if not args.only or cell.name in args.only]
    found = Counter(row["status"] for row in run(chosen, args.out, args.budget))
    return int(found["failed"] + found["over time"] > 0)


def run(cells: Sequence[Cell], out: Path, budget: float) -> list[dict[str, Any]]:
    """Run cells in their order; return a row for each, as `cells.jsonl` has it."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    with (out / "cells.jsonl").open("w", encoding="utf-8") as file:
        for cell in cells:
            left = budget - (time.monotonic() - begin)
            row = {"name": cell.name, "command": cell.text, **outcome(cell, out, left)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            why = f": {row['why']}" if "why" in row else ""
            print(f"{cell.name}: {row['status']}{why} ({row['seconds']:.0f} s)", flush=True)
            rows.append(row)
    return rows


def outcome(cell: Cell, out: Path, left: float) -> dict[str, Any]:
    """Run a cell, unless it cannot run or time is short; return its status, the seconds it took and its output."""
    if why := lacking(cell):
        return {"status": "skipped", "why": why, "seconds": 0.0}
    if cell.seconds > left:
        why = f"may take {cell.seconds:.0f} s of the {max(left, 0):.0f} s that are left"
        return {"status": "no time left", "why": why, "seconds": 0.0}
    log, begin = out / f"{cell.name}.log", time.monotonic()
    code = run_to_end(cell, out, log)
    row = {"seconds": round(time.monotonic() - begin, 1), "file": log.name}
    if code is None:
        return {"status": "over time", "why": f"ended after {cell.seconds:.0f} s", **row}
    return {"status": "failed", "why": f"exit status {code}", **row} if code else {"status": "ran", **row}


def lacking(cell: Cell) -> str | None:
    """Return why a cell cannot run on this machine, or None if it can."""
    if cell.gpus:
        import torch

        if (here := torch.cuda.device_count()) < cell.gpus:
            return f"needs {cell.gpus} GPUs, and {here} are here"
    for name in cell.packages:
        if not installed(name):
            return f"{name} is not installed"
    return None


def installed(module: str) -> bool:
    """Return whether a module, of a package perhaps, can be found."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def run_to_end(cell: Cell, out: Path, log: Path) -> int | None:
    """Run a cell and end whatever it leaves behind; return the exit status, or None where it ran over its time."""
    command = [part.replace("{out}", str(out / cell.name)) for part in cell.command]
    command[0] = sys.executable if command[0] == "python" else command[0]
    mark = uuid.uuid4().hex
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **cell.environment, MARK: mark}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 a command of ours, without a shell
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(cell.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process, mark)


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a cell's process and all that carry its mark: ask them, then kill those that are still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            if process.poll() is not None and not marked(mark):
                return
            time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Return the processes, zombies aside, whose environment carries a mark; none where there is no /proc."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running cell is ended too
    raise SystemExit(main())
