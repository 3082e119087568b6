"""Starts the ranks of this machine with torchrun's launcher, and ends them all with one line when interrupted."""

from __future__ import annotations

import logging
import os
import signal
import sys

from gpt.errors import USER_ERROR_STATUS, UserError

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
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.disable(logging.ERROR)  # of torchrun, in this process only: what follows says what happened
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = ["--standalone", "--nproc-per-node", str(ranks), script, *argv]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == USER_ERROR_STATUS:  # the rank has said what is wrong
            return USER_ERROR_STATUS
        how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit status {failure.exitcode}"
        print(f"rank {rank} ended with {how}; the other ranks were ended too", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as cut:
        print(f"\n{signal.Signals(cut.sigval).name}: all {ranks} ranks have ended", file=sys.stderr)
        return 128 + int(cut.sigval)
    return 0
