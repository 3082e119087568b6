"""Train a Megatron-Core GPT on text with distributed attention, on the GPUs of this machine or on two CPU ranks.

On one machine `python examples/train.py --nproc-per-node 4 --seq-length 8192` starts the ranks itself; over several,
`torchrun --nnodes 2 ... examples/train.py --data PREFIX --vocab-size 50304` does, as for any Megatron script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

from gpt.parent import LAUNCHER, end_with_parent

IS_RANK = "RANK" in os.environ
if IS_RANK:  # end at once on Ctrl-C, even inside a collective; the launcher reports it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()

# Megatron says on every rank that it falls back from Apex and Transformer Engine, which this example does without.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

from dfa_megatron import MegatronConfig
from dfa_megatron.doctor.start_ranks import INTERRUPTED_STATUS, USER_ERROR_STATUS, ranks_here, start
from dfa_megatron.errors import DistAttentionError
from gpt.errors import UserError
from gpt.flags import parse_flags, settle
from gpt.folders import writable
from gpt.saved import facts_of, find
from gpt.text import open_tokens

GRACE_S = 2.0
"""Torchrun ends the other ranks within these seconds after one has ended; a later message comes from no other rank."""


def main(argv: list[str]) -> int:
    """Run as the launcher, or as one rank if torchrun started this process; return the exit status."""
    import torch

    args = parse_flags(argv)
    ranks = int(os.environ["WORLD_SIZE"]) if IS_RANK else ranks_here(args.nproc_per_node)
    # Every rank makes the same checks before any rank waits for another.
    options = MegatronConfig.from_args(args)
    sizes = settle(args, ranks, cuda=torch.cuda.is_available())
    tokens = open_tokens(args.data, vocab_size=args.vocab_size, seq_length=args.seq_length)
    found = find(args, facts_of(args, sizes, tokens))
    if not IS_RANK:
        _need("megatron.core", "matplotlib", "rich")
    if not IS_RANK or os.environ["RANK"] == "0":
        args.save_report = args.save_report or os.path.join("runs", time.strftime("%Y%m%d-%H%M%S"))
        writable(args.save_report, "--save-report")
        if args.save:
            writable(args.save, "--save")
    if not IS_RANK:
        os.environ[LAUNCHER] = str(os.getpid())
        return start([__file__, *argv, "--save-report", args.save_report], ranks)

    import torch.distributed as dist

    from gpt.loop import gather_counters, join, train
    from gpt.report import Report

    device = join(sizes)
    report = Report(args, sizes, tokens, device, found) if dist.get_rank() == 0 else None
    try:
        train(args, sizes, options, tokens, device, found, report.tell if report else lambda step: None)
        counters = gather_counters(device)
        if report:
            report.finish(counters)
    finally:
        if report:
            report.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _need(*packages: str) -> None:
    """Name a missing package now and not on every rank later."""
    from importlib.util import find_spec

    for package in packages:
        parent = package.split(".")[0]
        if find_spec(parent) is None or find_spec(package) is None:
            raise UserError(f"{package} is missing: pip install 'dfa-megatron[megatron,examples]'")


def _tell(error: Exception) -> int:
    """Print one line for an error that all ranks may have: rank 0 at once, the others if they are still alive then.

    Attention also fails if another rank was killed; torchrun then ends this rank before it prints.
    """
    if IS_RANK and os.environ["RANK"] != "0":
        time.sleep(GRACE_S)
    elif IS_RANK and isinstance(error, DistAttentionError):
        time.sleep(GRACE_S / 2)
    print(f"{Path(__file__).name}: {error}", file=sys.stderr, flush=True)
    return USER_ERROR_STATUS


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except (UserError, DistAttentionError) as error:
        status = _tell(error)
    except KeyboardInterrupt:  # before the ranks were started
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED_STATUS
    except Exception:  # noqa: BLE001 - any error gets its traceback
        if IS_RANK:  # the connection may have broken because another rank was killed; torchrun reports that rank
            time.sleep(GRACE_S)
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):  # nowhere to write to
        sys.stdout.flush()
        sys.stderr.flush()
    if IS_RANK and status:
        os._exit(status)  # do not wait for ranks that may be inside a collective
    sys.exit(status)
