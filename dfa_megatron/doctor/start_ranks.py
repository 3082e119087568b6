"""Start a command again on every rank of this machine, with torchrun's launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dfa_megatron.errors import UnsupportedError

USER_ERROR_STATUS = 2
"""The exit status of a rank that has already printed its user error, as in argparse."""


def device_of(asked: str) -> str:
    """Return the device of a flag: "auto" is GPUs if there are any.

    Raises:
        UnsupportedError: CUDA was asked for and there is none.
    """
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda", "PyTorch sees no GPU here", "--device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def ranks_here(asked: int | None, device: str = "auto") -> int:
    """Return how many ranks to start: as asked, else one per GPU, else two.

    Raises:
        UnsupportedError: more ranks than GPUs.
    """
    import torch

    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if gpus and asked is not None and asked > gpus:
        raise UnsupportedError(f"{asked} ranks", f"this machine has {gpus} GPUs", "one rank per GPU")
    return asked or gpus or 2


def start(command: Sequence[str], ranks: int) -> int:
    """Run `python COMMAND...` (a script or `-m MODULE`, and its arguments) on some ranks of this machine.

    Returns:
        The exit status of the first rank that failed, or 130 after Ctrl-C.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # of torchrun, in this process only: the ranks say what is wrong
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(["--standalone", "--nproc-per-node", str(ranks), *command]))
    except ChildFailedError as failed:
        return _tell_of(failed.failures)
    except SignalException as cut:
        print(f"\n{signal.Signals(cut.sigval).name}: all {ranks} ranks have ended", file=sys.stderr)
        return 128 + int(cut.sigval)
    finally:
        logging.disable(before)
    return 0


def _tell_of(failures: Mapping[int, Any]) -> int:
    """Print in one line which rank failed first, and return the exit status.

    Args:
        failures: by rank, torchrun's ProcessFailure, including the ranks that torchrun ended: with SIGTERM, and those
            that do not heed it, such as a stopped one, with SIGKILL half a minute later.
    """
    codes: dict[int, int] = {rank: failure.exitcode for rank, failure in failures.items()}
    # A signal comes before an exit status: other ranks fail when a rank is gone. torchrun's own signals come last: it
    # kills only what is left half a minute after a first rank has failed by itself.
    own = {-signal.SIGTERM, -signal.SIGKILL} if max(codes.values()) > 0 else {-signal.SIGTERM}
    rank = min(codes, key=lambda rank: (codes[rank] in own, codes[rank] > 0, rank))
    code = codes[rank]
    if code == USER_ERROR_STATUS:
        return code
    how = f"ended with exit status {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    how += ": perhaps the machine is out of memory" if code == -signal.SIGKILL else ""
    who = "a rank" if code == -signal.SIGTERM and len(codes) > 1 else f"rank {rank}"
    print(f"{who} {how}; the other ranks were ended too", file=sys.stderr)
    return code if code > 0 else 128 - code
