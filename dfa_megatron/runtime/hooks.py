"""Hooks: a measurement may wrap the algebra and the transport of every attention that runs while it lasts.

Under a hook programs run as they stand and no run is replayed, so the host takes longer than without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from dfa_megatron.plan.interpret import Algebra
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.execute.tensors import Tensors


@dataclass(frozen=True, slots=True)
class HookedRun:
    """One phase of one attention, about to run.

    tensors: the memory of this rank. algebra, transport: what the loop drives, unless a hook replaces it.
    """

    plan: Plan
    tensors: Tensors
    algebra: Algebra
    transport: Transport


class Hook(Protocol):
    """One measurement. Its name tells the CUDA graphs captured under it from others."""

    name: str

    def wrap(self, run: HookedRun) -> tuple[Algebra, Transport]:
        """Return the algebra and the transport to drive instead; either may be the run's own."""
        ...


ACTIVE: list[Hook] = []
"""The hooks under which attentions run now, the first one innermost."""


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Wrap every distributed attention that this process runs inside."""
    ACTIVE.append(hook)
    try:
        yield
    finally:
        ACTIVE.remove(hook)
