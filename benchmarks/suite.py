"""Runs every GPU test, then every measurement, of this project on one machine, each within its own time.

    python benchmarks/suite.py                                  # all GPUs here; `make gpu` is the same
    python benchmarks/suite.py --list                           # what there is, and about how long it takes
    python benchmarks/suite.py --only kernels-flash4 packed --budget 500 --out runs/a

The interpreter that runs this runs everything; no network, no virtual environment, no make. Stages run one after
another, but tests of one GPU side by side, each on a GPU of its own. A stage whose GPUs or packages are missing is
skipped with the reason, and one that fails or takes too long stops no other. The folder --out gets a log of each stage,
its results, and summary.json. Exit status: 0, or 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from suite_stages import Stage, stages

ROOT = Path(__file__).resolve().parents[1]
TOLD = 30.0
"""Seconds between signs of life of a stage."""
GRACE = 15.0
"""Seconds that a stage has to end its own processes."""
REASON = r"(Error|Exception|error): \w|^FAILED|is not supported|\bwrong\b"
"""A line that says why a stage failed; torchrun and pytest write others after it."""
MARK = "DFA_SUITE_STAGE"
"""Variable in the environment of all processes of a stage."""


@dataclass
class Outcome:
    """What became of a stage. status: passed, failed, timed out, skipped, not run, interrupted."""

    stage: str
    status: str
    seconds: float = 0.0
    log: str = ""
    why: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit status."""
    args = flags(argv)
    gpus = count_gpus() if args.gpus is None else args.gpus
    chosen = choose(stages(gpus, args.out), args.only)
    if args.list:
        for stage in chosen:
            print(f"{stage.name:18} about {stage.minutes:3} min, {stage.what}{_absence(stage, gpus)}")
        print(f"{'':18} about {sum(stage.minutes for stage in chosen):3} min in all")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(chosen, gpus, args.out, args.budget)
    print(table(outcomes))
    return int(any(outcome.status in ("failed", "timed out", "interrupted") for outcome in outcomes))


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these, in the order of --list")
    parser.add_argument("--list", action="store_true", help="name the stages and run none")
    parser.add_argument("--budget", type=float, help="seconds for all; what is left then is named as not run")
    parser.add_argument("--gpus", type=int, help="how many to use (default: all)")
    moment = datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"gpu-{moment}", help="default: runs/gpu-DATE-TIME")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    return args


def count_gpus() -> int:
    """Without a CUDA context of ours."""
    import torch

    return torch.cuda.device_count()


def choose(every: list[Stage], names: Sequence[str] | None) -> list[Stage]:
    """Those that are named, or all."""
    known = [stage.name for stage in every]
    if unknown := [name for name in names or () if name not in known]:
        raise SystemExit(f"no stage {', '.join(unknown)}; there are {', '.join(known)}")
    return [stage for stage in every if not names or stage.name in names]


def absence(stage: Stage, gpus: int) -> str:
    """Why a stage cannot run here, or nothing."""
    if gpus < stage.gpus:
        return f"needs {stage.gpus} GPU{'s' * (stage.gpus > 1)}, {gpus} here"
    missing = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    missing += [str(file.name) for file in stage.files if not (file.exists() or shutil.which(str(file)))]
    return f"not here: {', '.join(missing)}" if missing else ""


def _absence(stage: Stage, gpus: int) -> str:
    return f" [skipped: {why}]" if (why := absence(stage, gpus)) else ""


def run_all(chosen: list[Stage], gpus: int, out: Path, budget: float | None) -> list[Outcome]:
    """In order; summary.json is written as stages end."""
    end = None if budget is None else time.monotonic() + budget
    about = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": gpus, "python": sys.version.split()[0]}
    outcomes: list[Outcome] = []
    for together in groups(chosen, gpus):
        for stage in together:
            number = chosen.index(stage) + 1
            print(f"[{number}/{len(chosen)}] {stage.name}: about {stage.minutes} min, {stage.what}", flush=True)
        left = None if end is None else end - time.monotonic()
        if any(one.status == "interrupted" for one in outcomes):
            made = [Outcome(stage.name, "not run", why="interrupted") for stage in together]
        elif left is not None and left <= 0:
            why = f"the {budget:.0f} s of --budget are spent"
            made = [Outcome(stage.name, "not run", why=why) for stage in together]
        else:
            made = run_together(together, gpus, out, left)
        for outcome in made:
            why = f" ({outcome.why})" if outcome.why else ""
            print(f"    {outcome.stage} {outcome.status} in {outcome.seconds:.0f} s{why}", flush=True)
        outcomes += made
        summary = {**about, "stages": [asdict(one) for one in outcomes]}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return outcomes


def groups(chosen: list[Stage], gpus: int) -> Iterator[list[Stage]]:
    """The stages that run at the same time: as many of those that may as there are GPUs, or one."""
    for beside, some in groupby(chosen, key=lambda stage: stage.beside):
        stages, size = list(some), max(1, gpus) if beside else 1
        yield from (stages[at : at + size] for at in range(0, len(stages), size))


def run_together(together: list[Stage], gpus: int, out: Path, left: float | None) -> list[Outcome]:
    """All at once, each on a GPU of its own if there are several."""
    stopped = threading.Event()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = shown.split(",") if shown else [str(device) for device in range(gpus)]

    def one(place: int, stage: Stage) -> Outcome:
        if why := absence(stage, gpus):
            return Outcome(stage.name, "skipped", why=why)
        if stage.beside and len(devices) > 1:
            stage = replace(stage, environment={**stage.environment, "CUDA_VISIBLE_DEVICES": devices[place]})
        return run(stage, out, left, stopped)

    with ThreadPoolExecutor(len(together)) as pool:
        begun = [pool.submit(one, place, stage) for place, stage in enumerate(together)]
        try:
            wait(begun)
        except KeyboardInterrupt:
            stopped.set()
        return [outcome.result() for outcome in begun]


def run(stage: Stage, out: Path, left: float | None, stopped: threading.Event) -> Outcome:
    """One stage, its output in a log; none of its processes outlives it, nor `stopped`."""
    log = out / f"{stage.name}.log"
    limit = stage.limit if left is None else min(stage.limit, left)
    mark = f"{os.getpid()}-{stage.name}"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", MARK: mark, **stage.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        print(
            "$", " ".join([*(f"{k}={v}" for k, v in stage.environment.items()), *stage.command]), file=file, flush=True
        )
        process = subprocess.Popen(  # noqa: S603 -- the commands are ours
            stage.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        status, why = watch(process, log, begin, limit, stopped)
        stop(process, mark)
    if status == "timed out":
        why = f"ended after {limit:.0f} s" + (", the last of --budget" if limit < stage.limit else "")
    elif status == "failed":
        why = f"exit status {process.returncode}: {last_line(log, REASON) or last_line(log)}"
    return Outcome(stage.name, status, round(time.monotonic() - begin, 1), log.name, why)


def watch(
    process: subprocess.Popen[Any], log: Path, begin: float, limit: float, stopped: threading.Event
) -> tuple[str, str]:
    """Wait for a process and show its last line from time to time; returns its status, and why if it was stopped."""
    shown = begin
    while True:
        try:
            code = process.wait(timeout=max(0.01, min(1.0, begin + limit - time.monotonic())))
            return ("passed", "") if code == 0 else ("failed", "")
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if stopped.is_set():
            return "interrupted", "by the keyboard"
        if now - begin >= limit:
            return "timed out", ""
        if now - shown >= TOLD:
            shown = now
            print(f"    {now - begin:4.0f} s  {log.stem}: {last_line(log)[:100]}", flush=True)


def stop(process: subprocess.Popen[Any], mark: str) -> None:
    """End all that a stage started and that is still there, also what has left its group, as torchrun's ranks do."""
    for how, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        for pid in marked(mark):
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                continue
        while (process.poll() is None or marked(mark)) and time.monotonic() < end:
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Processes whose environment had the mark when they began, which children inherit."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def last_line(log: Path, holding: str = r"\w") -> str:
    """The last that was written and holds a word, or what a regular expression says."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace")[-20000:].splitlines()]
    return next((line for line in reversed(lines) if re.search(holding, line)), "")


def table(outcomes: list[Outcome]) -> str:
    """A line for each stage."""
    lines = [f"{'stage':18} {'status':10} {'seconds':>8}  log, why"]
    for one in outcomes:
        lines.append(f"{one.stage:18} {one.status:10} {one.seconds:8.0f}  {one.log} {one.why}".rstrip())
    return "\n".join(["", *lines])


if __name__ == "__main__":
    sys.exit(main())
