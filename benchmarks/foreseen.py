"""Compares what was measured on GPUs with what the planner's simulation says of it; needs no GPU.

    python benchmarks/foreseen.py                             # everything in benchmarks/results
    python benchmarks/foreseen.py runs/a/results.json ...     # files of `dfa-megatron bench`

A cell is one attention on one machine: ranks, heads, length, transport. For each cell: the schedules that were
measured, forward and backward in ms, with how far off the simulation is; the schedule that `auto` takes of these; and
how much longer that took than the fastest of its layout. Cells that a host's launches decide (HOST, LAUNCHES) are
marked: the simulation knows of GPUs and links only.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfa_megatron import kernels
from dfa_megatron.plan.cost.choose import best, candidates
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, Hardware, computing_with
from dfa_megatron.plan.cost.simulate import simulate
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.schedules import SCHEDULES, plan_named

RESULTS = Path(__file__).parent / "results"
LONG = 4096
"""Tokens of a rank from which a simulation should hold."""
HOST = 0.7
"""Of a forward and backward: where the host was busy for longer, its launches decided."""
LAUNCHES = 6.0
"""Milliseconds of a forward and backward below which they did, on these machines, where the host's are not known."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is the same for rows that compete."""

    file: str
    ranks: int
    heads: int
    kv_heads: int
    length: int
    kernel: str
    transport: str
    direct: bool
    """GPUs reach each other's memory."""

    @property
    def shape(self) -> AttentionShape:
        """As the runtime makes it."""
        return AttentionShape(
            heads=self.heads, kv_heads=self.kv_heads, backward_needs=kernels.get(self.kernel).backward_needs
        )

    @property
    def hardware(self) -> Hardware:
        """The shipped profile."""
        found = computing_with(self.kernel, H200_NVLINK if self.direct else H200_SLOW_LINK)
        return found.over("copy_engine") if self.transport == "copy_engine" else found

    def simulated(self, schedule: str) -> float:
        """Milliseconds of a forward and backward."""
        return 1e3 * simulate(plan_named(schedule, causal(self.length), self.ranks), self.shape, self.hardware).makespan

    def taken(self, among: Collection[str]) -> str:
        """What `auto` prefers of these schedules."""
        looked_at = candidates(causal(self.length), self.ranks, layout="auto", shape=self.shape, hardware=self.hardware)
        taken = best(tuple(one for one in looked_at if one.schedule in among))
        assert taken is not None, f"auto looks at none of {among}"
        return taken.schedule


@dataclass(frozen=True, slots=True, order=True)
class Timed:
    """Milliseconds of a forward and backward, and of the host until they were queued; 0 where that is not known."""

    time: float
    host: float

    @property
    def launches(self) -> bool:
        """The host decided."""
        return self.host > HOST * self.time if self.host else self.time < LAUNCHES


def read(path: Path) -> dict[Cell, dict[str, Timed]]:
    """The fastest run of each schedule, for each cell of a file of ours; other files have none."""
    content = json.loads(path.read_text())
    rows, machine = (
        (content, {}) if isinstance(content, list) else (content.get("rows", []), content.get("machine", {}))
    )
    cells: dict[Cell, dict[str, Timed]] = defaultdict(dict)
    for row in rows:
        words = str(row.get("method", "")).split()
        if row.get("kind", "ours") != "ours" or row.get("mask", "causal") != "causal" or row.get("payload"):
            continue
        if not set(words) <= {"dfa", "auto", "flash4", "cudnn", "p2p", "copy_engine", *SCHEDULES}:
            continue  # graphs, ablations, heads exchanged
        schedule = row.get("schedule") or (words[1] if words else "")
        schedule = row.get("took") or schedule if schedule == "auto" else schedule
        time = row.get("both_ms", row.get("ms_b"))
        ranks = int(path.name.split("xh200")[0][-1]) if "xh200" in path.name else int(row["ranks"])
        if schedule in SCHEDULES and time and ranks > 1:
            cell, timed = _cell(path, ranks, row, words, machine), Timed(time, row.get("both_host_ms") or 0.0)
            cells[cell][schedule] = min(timed, cells[cell].get(schedule, timed))
    return cells


def _cell(path: Path, ranks: int, row: dict[str, Any], words: Sequence[str], machine: dict[str, Any]) -> Cell:
    kernel = row.get("kernel") or next(word for word in words if word in ("flash4", "cudnn"))
    default = "copy_engine" if kernel == "flash4" and "p2p-off" not in path.name else "p2p"
    transport = row.get("transport") or next((word for word in words if word in ("p2p", "copy_engine")), default)
    off = "p2p-off" in path.name or "NCCL_P2P_DISABLE" in json.dumps(machine.get("environment", {}))
    return Cell(
        path.name,
        ranks,
        row.get("heads") or row.get("h") or 32,
        row.get("kv_heads") or row["kv"],
        row.get("seq_length") or row["n"],
        kernel,
        transport,
        not off,
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """One cell. errors: simulated over measured, less one, by schedule. lost: of the choice against the fastest."""

    cell: Cell
    measured: dict[str, Timed]
    errors: dict[str, float]
    taken: str
    lost: float

    @property
    def launches(self) -> bool:
        """The host decided how long the fastest took."""
        return min(self.measured.values()).launches

    @property
    def long(self) -> bool:
        """Chunks of a rank are long enough for the simulation to hold."""
        return self.cell.length // self.cell.ranks >= LONG


def judge(cell: Cell, measured: dict[str, Timed]) -> Judgement:
    """Simulate what was measured, and choose among it."""
    errors = {schedule: cell.simulated(schedule) / timed.time - 1 for schedule, timed in measured.items()}
    rivals = {name: timed for name, timed in measured.items() if SCHEDULES[name].layout == "contiguous"} or measured
    taken = cell.taken(rivals)
    return Judgement(cell, measured, errors, taken, rivals[taken].time / min(rivals.values()).time - 1)


def main() -> None:
    """Print a table and the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of benchmarks/results")
    files = parser.parse_args().files or sorted(RESULTS.glob("*.json"))
    judged = [judge(cell, measured) for path in files for cell, measured in read(path).items()]
    for one in judged:
        cell = one.cell
        where = f"{cell.ranks} x H200, {cell.transport}{'' if cell.direct else ' without the link'}, {cell.kernel}"
        runs = ", ".join(f"{name} {timed.time:.1f} ({one.errors[name]:+.0%})" for name, timed in one.measured.items())
        choice = f"; takes {one.taken}, {one.lost:+.1%}" if len(one.measured) > 1 else ""
        mark = " [launches]" if one.launches else ""
        print(f"{where}, {cell.heads}:{cell.kv_heads}, {cell.length // 1024}K: {runs}{choice}{mark}")
    for name, some in (("all", judged), ("without launches", [one for one in judged if not one.launches])):
        errors = [abs(error) for one in some if one.long for error in one.errors.values()]
        choices = [one.lost for one in some if len(one.measured) > 1]
        print(
            f"{name}: simulated within 15 % of measured {sum(e <= 0.15 for e in errors)} of {len(errors)}; "
            f"auto within 3 % of the fastest {sum(lost <= 0.03 for lost in choices)} of {len(choices)}"
        )


if __name__ == "__main__":
    main()
