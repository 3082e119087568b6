"""`dfa-megatron run`: check a plan, run it forward and backward, and compare with dense attention in float64."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from dfa_megatron.errors import PlanError, UnsupportedError
from dfa_megatron.flags import add_flags, from_flags
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.text import from_text
from dfa_megatron.plan.proof.check import check_plan
from dfa_megatron.plan_run.run_flags import RunFlags


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a plan from a file, and compare with dense attention",
        description=__doc__,
        epilog="Without --ranks all ranks run in this process. Started by torchrun it is one of them.",
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
    flags = from_flags(RunFlags, args)
    plan = read_plan(Path(flags.plan))
    check_plan(plan, batch=flags.batch)
    if "RANK" in os.environ:
        from dfa_megatron.plan_run.on_ranks import one_rank

        return one_rank(plan, flags)
    if flags.ranks is None:
        from dfa_megatron.plan_run.on_ranks import all_ranks

        return all_ranks(plan, flags)
    if flags.ranks != plan.ranks:
        raise UnsupportedError(f"--ranks {flags.ranks}", f"the plan is for {plan.ranks}", f"--ranks {plan.ranks}")
    from dfa_megatron.doctor.start_ranks import device_of, ranks_here, start

    return start(["-m", "dfa_megatron.cli.main", *args.argv], ranks_here(flags.ranks, device_of(flags.device)))


def read_plan(path: Path) -> AttentionPlan:
    """Read the text of a plan.

    Raises:
        PlanError: it is none; one line that names the file, the line and the reason.
        OSError: the file cannot be read.
    """
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (PlanError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error
