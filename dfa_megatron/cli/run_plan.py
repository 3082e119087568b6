"""`dfa-megatron run`: check a plan, run it on ranks forward and backward, and compare with dense float64 attention."""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import PlanError, UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.names import KERNELS
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.text import from_text
from dfa_megatron.plan.proof.check import check_plan

_COPIES = 7
"""Matrices of all scores, float64, that dense attention and its gradients hold at once; measured."""
_PROCESS = 1 << 29
"""Bytes of a rank beside them."""


@dataclass(frozen=True)
class RunFlags:
    """The flags of the command."""

    plan: str = flag("", "the plan, as `dfa-megatron plan --text FILE` writes it", metavar="FILE", required=True)
    device: str = flag("cpu", "where the plan's ranks run, over gloo or NCCL", choices=("cpu", "cuda"))
    dtype: str = flag("float32", "of q, k and v", choices=("float64", "float32", "bfloat16", "float16"))
    kernel: str = flag("auto", "computes a block", choices=KERNELS)
    batch: int = flag(1, "sequences", metavar="N")
    heads: int = flag(4, "query heads", metavar="N")
    kv_heads: int = flag(2, "key and value heads", metavar="N")
    head_dim: int = flag(32, "of a head", metavar="N")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a plan from a file, and compare with dense attention",
        description=__doc__,
        epilog="It starts a process for each rank of the plan. Started by torchrun it is one of them.",
    )
    add_flags(parser, RunFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the plan; return 0, or 1 where a result is wrong.

    Raises:
        PlanError: the file is no plan, or the plan is wrong; says which line, or shows which cell.
        UnsupportedError: the ranks are not those of the plan, or nothing serves the sizes.
        OSError: the file cannot be read.
    """
    flags, path = from_flags(RunFlags, args), Path(args.plan)
    try:
        plan = from_text(path.read_text(encoding="utf-8"))
    except (PlanError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error
    from dfa_megatron.doctor import start_ranks, world

    _refuse_beyond(_free(start_ranks.device_of(flags.device)), plan, flags)
    check_plan(plan, batch=flags.batch)
    if "RANK" not in os.environ:
        ranks = start_ranks.ranks_here(plan.ranks, start_ranks.device_of(flags.device))
        return start_ranks.start(["-m", "dfa_megatron.cli.main", *args.argv], ranks)
    here = world.join(flags.device)
    if here.size != plan.ranks:
        raise UnsupportedError(f"{here.size} ranks", f"the plan is for {plan.ranks}", f"{plan.ranks} ranks")
    off, far = compared(plan, flags, here)
    if here.rank == 0:
        print(f"{plan}, digest {plan.digest}: every pair once, every result at its owner")
        shown = ", ".join(f"{name} {error:.1e}" for name, error in off.items())
        print(f"{flags.dtype} against dense float64, relative: {shown}: {f'WRONG: {far}' if far else 'right'}")
    here.leave()
    return int(bool(far))


def _free(device: str) -> int:
    """Return the bytes that may still be taken, on the GPU or on this machine."""
    import torch

    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError):
        return sys.maxsize


def _refuse_beyond(free: int, plan: AttentionPlan, flags: RunFlags) -> None:
    """Refuse a plan whose comparison takes more than these bytes: a CPU's ranks share them."""
    ranks, length = plan.ranks if flags.device == "cpu" else 1, plan.forward.mask.length
    free = max(0, free - (0 if "RANK" in os.environ else ranks * _PROCESS))
    square = ranks * _COPIES * 8 * flags.batch * flags.heads
    if square * length**2 > free:
        most = math.isqrt(free * 9 // 10 // square) // (2 * plan.ranks) * 2 * plan.ranks
        taken, left = (nbytes / 2**30 for nbytes in (square * length**2, free))
        what, which = f"a plan over {length:,} tokens", "dense attention, which every rank compares with,"
        why = f"{which} takes {taken:,.1f} GiB, and {left:,.1f} are free"
        instead = f"the same plan over {most} tokens: dfa-megatron plan --seq-length {most}"
        raise UnsupportedError(what, why, instead if most else "fewer heads, or a machine with more memory")


def compared(plan: AttentionPlan, flags: RunFlags, world: Any) -> tuple[dict[str, float], str]:
    """Return the error of each result, and the names of those beyond the limit; collective over a `World`."""
    import torch

    from dfa_megatron.doctor.distributed_call import SLACK, Case, compare
    from dfa_megatron.doctor.kernel_trial import Trial, wrong

    mask, dtype = plan.forward.mask, getattr(torch, flags.dtype)
    sizes = (mask.length, flags.heads, flags.kv_heads, flags.head_dim, dtype, str(world.device))
    options = {"plan": plan, "layout": plan.layout, "config": DistAttentionConfig(kernel=flags.kernel)}
    off = compare(Case(mask, plan.forward.layout, options), Trial.square(*sizes, flags.batch), world)
    return off, ", ".join(wrong(off, dtype, SLACK))
