"""Replay: run recorded operations on registers, and free each register after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

Registers = list[Any]
"""The values of one replay, by register."""


class Op(NamedTuple):
    """Call `function` on the registers `reads`, write the result to `writes`, then drop the registers in `frees`.

    holds: registers that must live until then, beside those that it reads.
    """

    function: Callable[..., Any]
    reads: tuple[int, ...]
    writes: int
    frees: tuple[int, ...] = ()
    holds: tuple[int, ...] = ()


class OpFailed(Exception):  # noqa: N818
    """The operation at this place of a replay raised this error."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(at)
        self.at, self.error = at, error


def replay(ops: Sequence[Op], registers: Registers) -> None:
    """Run operations on registers.

    Raises:
        OpFailed: from the error of an operation.
    """
    read, at = registers.__getitem__, 0
    try:
        for at, (function, reads, writes, frees, _) in enumerate(ops):  # noqa: B007
            registers[writes] = function(*map(read, reads))
            for register in frees:
                registers[register] = None
    except Exception as error:
        raise OpFailed(at, error) from error


VIEWS = torch.as_strided, torch.Tensor.view
"""The functions by which a tape makes views."""


def allocating_late(ops: Sequence[Op], starts: Sequence[int] = ()) -> list[Op]:
    """Return the same operations, each allocation right before the first that reads it.

    A kernel's package allocates its results first, its workspaces next, and fills the results last.

    starts: where parts of the operations begin; each operation stays in its part.
    """
    edges = [0, *starts, len(ops)]
    return [op for lo, hi in pairwise(edges) for op in _allocating_late(ops[lo:hi])]


def _allocating_late(ops: Sequence[Op]) -> Iterator[Op]:
    waiting: dict[int, Op] = {}
    for op in ops:
        if isinstance(op.function, partial) and op.function.func is torch.empty_strided:
            waiting[op.writes] = op
            continue
        for register in (*op.reads, *op.holds):
            if register in waiting:
                yield waiting.pop(register)
        yield op
    yield from waiting.values()


def freeing(ops: Sequence[Op], written: set[int], *, kept: frozenset[int]) -> list[Op]:
    """Return the same operations, with each register that they write freed after its last use.

    written: other registers that are freed: the operations only read them. kept: those that are not.
    """
    last = {register: at for at, op in enumerate(ops) for register in (*op.reads, op.writes, *op.holds)}
    frees: dict[int, list[int]] = {}
    for register in sorted(({op.writes for op in ops} | written) & last.keys() - kept):
        frees.setdefault(last[register], []).append(register)
    return [
        Op(function, reads, writes, tuple(frees.get(at, ())), holds)
        for at, (function, reads, writes, _, holds) in enumerate(ops)
    ]
