"""Run a self-check once when training starts: on rank 0, with the outcome sent to every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from dfa_megatron.errors import DistAttentionError, SelfCheckError, UnsupportedError
from dfa_megatron.selfcheck.case import Case
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, UNCHECKED, check
from dfa_megatron.selfcheck.table import text

logger = logging.getLogger("dfa_megatron.selfcheck")

WAIT = timedelta(hours=1)
"""How long the other ranks wait; a check ends its own processes long before that."""


_DONE: set[str] = set()
"""Keys that this process has checked."""


def check_at_start(key: str, make_case: Callable[[], Case]) -> None:
    """Check, log the table on rank 0 and go on; every rank of the default process group must call this.

    Args:
        key: of the configuration; the check of a key runs once.
        make_case: makes the case; called on rank 0 only.

    Raises:
        SelfCheckError: something differs, on every rank, with the table.
        UnsupportedError: this configuration cannot be checked, on every rank.
    """
    if key in _DONE:
        return
    _DONE.add(key)
    group = dist.new_group(backend="gloo", timeout=WAIT)
    status, said = _outcome(make_case) if dist.get_rank() == 0 else (RIGHT, "")
    status, said = _tell(status, said, group)
    dist.destroy_process_group(group)
    if status == DIFFERS:
        raise SelfCheckError(said)
    if status == UNCHECKED:
        raise UnsupportedError(said)
    if dist.get_rank() == 0:
        logger.info("%s", said)


def _outcome(make_case: Callable[[], Case]) -> tuple[int, str]:
    try:
        report = check(make_case())
    except (DistAttentionError, OSError, RuntimeError) as error:
        return UNCHECKED, str(error)
    return report.status, text(report)


def _tell(status: int, said: str, group: dist.ProcessGroup | None) -> tuple[int, str]:
    """Broadcast rank 0's status and text to every rank, as bytes."""
    content = torch.tensor([status, *said.encode()], dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    dist.broadcast(size, 0, group=group)
    if dist.get_rank() != 0:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, 0, group=group)
    told = bytes(content.tolist())
    return told[0], told[1:].decode()
