"""Run a script on ranks that are workers, which have imported its packages before: a launcher's take seconds each."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support.groups import as_torchrun_starts, free_port
from tests.support.workers import run_ranks

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
"""Of scripts on CPU ranks: nothing is compiled."""


def said_over_ranks(ranks: int, folder: Path, script: str, *words: str) -> str:
    """Return what a script, a file or the name of a module, prints on all its ranks, the first one first."""
    run_ranks(ranks, _run, free_port(), str(folder), script, words, timeout=170)
    return "".join((folder / f"said-{rank}").read_text(encoding="utf-8") for rank in range(ranks))


def of_one_rank() -> dict[str, str]:
    """Return the variables that torchrun gives to the only rank of a run."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {**dict(zip(names, "1100", strict=True)), **address}


def _run(rank: int, ranks: int, port: int, folder: str, script: str, words: tuple[str, ...]) -> None:
    as_torchrun_starts(rank, ranks, port)
    os.environ.update(ENVIRONMENT)
    os.chdir(folder)
    with open(f"said-{rank}", "w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.argv = [script, *words]
    try:
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    sys.stdout.flush()
