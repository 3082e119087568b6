"""Starts the ranks of this machine with torchrun's launcher, and ends them all with one line when interrupted."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from gpt.errors import USER_ERROR_STATUS, UserError
from gpt.parent import LAUNCHER

INTERRUPTED_STATUS = 128 + signal.SIGINT


def ranks_here(asked: int | None) -> int:
    """How many ranks to start: as asked, else one for each GPU, else two.

    Raises:
        UserError: more ranks than GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked is not None and gpus and asked > gpus:
        raise UserError(f"--nproc-per-node {asked}: this machine has {gpus} GPUs, and each rank needs its own")
    return asked or gpus or 2


def launch(script: str, ranks: int, argv: list[str]) -> int:
    """Run `script` with `argv` on so many ranks, as `python -m torch.distributed.run --standalone` does.

    Returns:
        The exit status: that of the first rank that failed; 130 after Ctrl-C.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.disable(logging.ERROR)  # of torchrun, in this process only: what follows says what happened
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = ["--standalone", "--nproc-per-node", str(ranks), script, *argv]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as failed:
        return _tell_of(failed.failures)
    except SignalException as cut:
        print(f"\n{signal.Signals(cut.sigval).name}: all {ranks} ranks have ended", file=sys.stderr)
        return 128 + int(cut.sigval)
    return 0


def _tell_of(failures: dict[int, Any]) -> int:
    """Say which rank failed first, in a line, and return the exit status that this makes.

    Args:
        failures: by rank, torchrun's ProcessFailure; the ranks that torchrun ended with SIGTERM are among them.
    """
    codes: dict[int, int] = {rank: failure.exitcode for rank, failure in failures.items()}
    # A signal comes before an exit status: other ranks fail when a rank is gone. torchrun's own SIGTERM comes last.
    rank = min(codes, key=lambda rank: (codes[rank] == -signal.SIGTERM, codes[rank] > 0, rank))
    code = codes[rank]
    if code == USER_ERROR_STATUS:  # the rank has said what is wrong
        return code
    how = f"ended with exit status {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    who = "a rank" if code == -signal.SIGTERM and len(codes) > 1 else f"rank {rank}"
    print(f"{who} {how}; the other ranks were ended too", file=sys.stderr)
    return code if code > 0 else 128 - code
