"""From a command line to ranks: start this command again on every rank, with torchrun's launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch

from dfa_megatron.errors import UnsupportedError


def device_of(asked: str) -> str:
    """The device that a flag means: "auto" is GPUs where there are any.

    Raises:
        UnsupportedError: CUDA was asked for and there is none.
    """
    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda", "PyTorch sees no GPU here", "--device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def start(module: str, argv: Sequence[str], ranks: int | None, device: str) -> int:
    """Run `python -m MODULE ARGV...` on so many ranks of this machine: one per GPU, or two on a CPU, if None.

    Returns:
        The exit status: that of the first rank that failed, 130 after Ctrl-C.

    Raises:
        UnsupportedError: more ranks than GPUs.
    """
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus and ranks is not None and ranks > gpus:
        raise UnsupportedError(f"--ranks {ranks}", f"this machine has {gpus} GPUs", "one rank per GPU")
    count = ranks or gpus or 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.disable(logging.ERROR)  # of torchrun, in this process only: the ranks say what is wrong
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    flags = ["--standalone", "--nproc-per-node", str(count), "-m", module, *argv]
    try:
        torchrun.run(torchrun.parse_args(flags))
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 2 or failure.exitcode < 0:
            print(f"rank {rank} ended with status {failure.exitcode}; the other ranks were ended too", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as cut:
        print(f"\n{signal.Signals(cut.sigval).name}: all {count} ranks have ended", file=sys.stderr)
        return 128 + int(cut.sigval)
    return 0
