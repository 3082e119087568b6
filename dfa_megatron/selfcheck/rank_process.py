"""`python -m dfa_megatron.selfcheck.rank_process FOLDER`: imports once, then forks the ranks of each world in turn.

It reads FOLDER/job.json. Each rank leaves WORLD-RANK.pt, or WORLD-RANK.error with what it raised. It ends every rank
it started: at a deadline, soon after another rank has failed, and when its own standard input closes because its
parent has ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE = 3.0
"""Seconds that the other ranks are given to end by themselves, after one has failed."""


def function_of(name: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def main(folder: Path) -> int:
    """Run every world of the job; the parent reads what the ranks left."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    sys.path[:] = job["path"]
    import torch

    torch.set_num_threads(1)
    function_of(job["measure"])
    for module in job["imports"]:
        importlib.import_module(module)
    for world in job["worlds"]:
        _run(folder, job, world)
    return 0


def _run(folder: Path, job: dict[str, Any], world: dict[str, Any]) -> None:
    ranks: dict[int, int] = {}
    for rank in range(world["ranks"]):
        pid = os.fork()
        if pid == 0:
            os._exit(_serve(folder, job, world, rank))
        ranks[pid] = rank
    try:
        _wait(folder, world["name"], ranks, job["timeout"])
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _wait(folder: Path, world: str, ranks: dict[int, int], timeout: float) -> None:
    """Wait until all ranks have ended; those that still run at the deadline stay in `ranks`."""
    deadline, failed = time.monotonic() + timeout, False
    while ranks and time.monotonic() < deadline:
        if select.select([sys.stdin], [], [], 0.05)[0]:
            raise SystemExit(1)  # nothing is ever written there: it was closed
        for pid, rank in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del ranks[pid]
            if status:
                deadline, failed = min(deadline, time.monotonic() + GRACE), True
                error = folder / f"{world}-{rank}.error"
                if not error.exists():
                    _say(error, "died", f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    for pid, rank in ranks.items():
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        stack = (folder / f"{world}-{rank}.stack").read_text(encoding="utf-8")
        when = "after another rank had failed" if failed else f"within {timeout:g} s"
        _say(folder / f"{world}-{rank}.error", "silent", f"did not end {when}; its stack:\n{stack}")


def _serve(folder: Path, job: dict[str, Any], world: dict[str, Any], rank: int) -> int:
    """The body of a rank process; returns its exit status."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(folder / f"{world['name']}-{rank}.stack", "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            _measure(folder, job, world, rank)
        except BaseException as error:  # noqa: BLE001 (a SystemExit of the framework must be told as well)
            kind = type(error).__name__
            _say(folder / f"{world['name']}-{rank}.error", kind, traceback.format_exc())
            return 1
    return 0


def _measure(folder: Path, job: dict[str, Any], world: dict[str, Any], rank: int) -> None:
    import torch.distributed as dist

    from dfa_megatron.selfcheck.record import Recorder

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / world['name']}.store",
        rank=rank,
        world_size=world["ranks"],
        timeout=timedelta(seconds=job["timeout"]),
    )
    for plant in world["before"]:
        function_of(plant)()
    recorder = Recorder(rank)
    function_of(job["measure"])(job["settings"], world["sections"], world["whole"], recorder)
    recorder.save(folder / f"{world['name']}-{rank}.pt")
    dist.barrier()  # a rank that left early would tear down connections that others still read from


def _say(path: Path, kind: str, text: str) -> None:
    path.write_text(json.dumps({"kind": kind, "text": text, "at": time.time()}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
