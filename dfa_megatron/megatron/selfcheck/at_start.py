"""`--dfa-selfcheck`: the self-check of a script's own flags, once, before its model is built."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

from dfa_megatron.megatron.refusals import SELFCHECK

logger = logging.getLogger("dfa_megatron.megatron")

_DONE: list[bool] = []
"""Not empty once this process has checked: a script asks for the spec once for each part of its model."""


def check_if_asked(args: Any) -> None:
    """Run the check where Megatron's arguments have `dfa_selfcheck`; the flags are those of this process.

    Raises:
        SelfCheckError: something differs, on every rank, with the table.
        UnsupportedError: the flags cannot be checked, or the process group does not stand.
    """
    if not getattr(args, "dfa_selfcheck", False) or _DONE:
        return
    SELFCHECK.check(no_process_group=not dist.is_initialized())
    from dfa_megatron.megatron.selfcheck.shrink import case_of
    from dfa_megatron.selfcheck.at_start import check_at_start

    _DONE.append(True)
    check_at_start(lambda: case_of(sys.argv[1:]))
