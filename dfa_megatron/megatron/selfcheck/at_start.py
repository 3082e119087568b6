"""`--dfa-selfcheck`: check a script's own flags once, before its model is built."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from dfa_megatron.megatron.proved_job import prove_if_asked
from dfa_megatron.megatron.refusals import SELFCHECK
from dfa_megatron.selfcheck.at_start import check_at_start


def check_if_asked(args: Any) -> None:
    """Run the check where Megatron's arguments have `dfa_selfcheck`; the flags are those of this process.

    Raises:
        SelfCheckError: something differs, on every rank, with the table.
        UnsupportedError: the flags cannot be checked, or there is no process group.
    """
    prove_if_asked(args)
    if not getattr(args, "dfa_selfcheck", False):
        return
    SELFCHECK.check(no_process_group=not dist.is_initialized())
    from dfa_megatron.megatron.selfcheck.shrink import case_of

    check_at_start("megatron", lambda: case_of(sys.argv[1:]))
