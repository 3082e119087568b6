"""Run an action on all ranks so that every rank learns of a failure on one."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dfa_megatron.doctor.world import PATIENCE, World
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.runtime.agreement.store import GroupStore
from dfa_megatron.runtime.comm.groups import channel_of

T = TypeVar("T")

OUT_OF_MEMORY = "out of memory"
REFUSED = "refused"
FAILED = "failed"
_FAILED_PATIENCE = 60.0
"""Seconds to wait after a failure: a rank that does not arrive by then is blocked by it."""
_IDLE_PATIENCE, _ROUNDS = 20.0, itertools.count()
_MEMORY_SIGNS = ("out of memory", "cublas_status_alloc_failed")
"""In the text of errors of PyTorch, NCCL and cuBLAS."""
_LONGEST = 300
"""Characters of a reason."""


class StuckError(DistAttentionError, RuntimeError):
    """After a failure some rank still waits for a message that will not come; nothing more can be run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of the first rank on which one happened; `state` is one of the three above."""

    state: str
    why: str


def together(world: World, action: Callable[[], T]) -> T | Failure:
    """Run an action on every rank; return its result if it succeeded on all, else the failure.

    The action should leave waiting for the device to the caller, because a rank that waits in it cannot learn of a
    failure.

    Raises:
        StuckError: ranks failed at different places, and one still waits for a message from another.
    """
    value, mine = None, Failure("", "")
    try:
        value = action()
    except Exception as error:  # noqa: BLE001 -- other people's packages raise anything, and a row says what
        mine = failure_of(error)
    patience = _FAILED_PATIENCE if mine.state else PATIENCE
    everyone = _told(world, {"state": mine.state, "why": mine.why}, patience)
    failures = [(rank, facts) for rank, facts in enumerate(everyone) if facts["state"]]
    if not failures:
        return cast(T, value)
    rank, facts = failures[0]
    idle = _idle(world, len(failures))
    if any(facts["busy"] for facts in _told(world, {"busy": "" if idle else "yes"})):
        raise StuckError(f"rank {rank} failed ({facts['why']}) and another waits for its messages")
    if (over := channel_of(None)) is not None:
        over.close()  # an attention that failed has lost the group
    if world.cuda:
        torch.cuda.empty_cache()
    return Failure(facts["state"], facts["why"])


def attempt(world: World, case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a case's figures, or as "failed" why some rank has none; then give its memory back."""
    found = together(world, case)
    gc.collect()
    if world.cuda:
        torch.cuda.empty_cache()
    return {"failed": f"{found.state}: {found.why}"} if isinstance(found, Failure) else found


def failure_of(error: Exception) -> Failure:
    """Summarize an exception for a row: its first line, and whether memory ran out."""
    if isinstance(error, UnsupportedError):
        return Failure(REFUSED, f"{error.what}: {error.why}" if error.why else str(error))
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:_LONGEST]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or any(sign in str(cause).lower() for sign in _MEMORY_SIGNS):
            return Failure(OUT_OF_MEMORY, text)
        cause = cause.__cause__ or cause.__context__
    return Failure(FAILED, f"{type(error).__name__}: {text}")


@functools.cache
def _store(side: dist.ProcessGroup) -> GroupStore:
    """Return the store of the group on which ranks report failures."""
    return GroupStore.of_group(side, "", PATIENCE)[0]


def _told(world: World, facts: dict[str, str], patience: float = PATIENCE) -> list[dict[str, str]]:
    """Return the facts of every rank, in rank order."""
    notes = _store(world.side).gather(f"round {next(_ROUNDS)}", json.dumps(facts), patience)
    if None in notes:
        raise StuckError(f"not every rank came back within {patience:g} s ({facts.get('why') or 'it did not fail'})")
    return [json.loads(note or "") for note in notes]


def _idle(world: World, failed: int) -> bool:
    """Return whether this rank is idle after a failure. On a CPU it is idle if every rank has failed."""
    if not world.cuda:
        return failed == world.size
    waiter = threading.Thread(target=torch.cuda.synchronize, args=(world.device,), daemon=True)
    waiter.start()
    waiter.join(_IDLE_PATIENCE)
    return not waiter.is_alive()
