"""What a measurement may wrap around an attention: its transport and its algebra. Nothing is wrapped outside of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.execute.tensors import Tensors


class Hook(Protocol):
    """One measurement. name: tells its CUDA graphs from others."""

    name: str

    def algebra(self, algebra: Tensors, plan: Plan) -> Tensors:
        """The algebra of one phase of a plan, or one that wraps it."""
        ...

    def transport(self, transport: Transport, algebra: Tensors) -> Transport:
        """The transport of that phase, or one that wraps it."""
        ...


_hooks: list[Hook] = []


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Wrap every distributed attention of this process inside."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)


def active_hooks() -> list[Hook]:
    """The measurements that are under way."""
    return _hooks
