"""One block of memory for what a replay allocates and does not return; its views are made once, not in each call.

The block is there only while a replay runs. PyTorch keeps the views of a storage while it has no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dfa_megatron.kernels.replay import VIEWS, Op, Registers

LARGEST, MOST = 48 << 20, 256 << 20
"""Bytes of one memory in a block, and of a block: it is there for the whole call, where larger ones come and go."""
_ALIGNMENT = 512
"""Bytes, as of PyTorch's allocator."""


class Ready(NamedTuple):
    """Registers as a replay begins with them, and the memory behind some of their views."""

    registers: Registers
    memory: torch.UntypedStorage | None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where in a block the memory of some registers lies.

    starts: the first byte of each, and the operation that would allocate it. views: operations that make views of them.
    """

    starts: tuple[tuple[int, Op], ...]
    views: tuple[Op, ...]
    nbytes: int

    def ready(self, registers: Registers, device: torch.device) -> Ready:
        """Fill the registers of the memory and of its views, in place."""
        if not self.nbytes:
            return Ready(registers, None)
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        for start, op in self.starts:
            shape, strides, dtype = _layout(op)
            registers[op.writes] = flat.view(dtype).as_strided(shape, strides, start // dtype.itemsize)
        for op in self.views:
            base, *where = map(registers.__getitem__, op.reads)
            if op.function is torch.as_strided:  # its offset is from the beginning of all memory
                where[2] += base.storage_offset()
            registers[op.writes] = op.function(base, *where)
        memory = flat.untyped_storage()
        memory.resize_(0)
        return Ready(registers, memory)


def workspace_of(ops: Sequence[Op], returned: Set[int]) -> tuple[Workspace, list[Op]]:
    """Return the memory of the operations, and the operations that are left. returned: registers of results."""
    roots: dict[int, int] = {}
    for op in ops:
        if _allocates(op):
            roots[op.writes] = op.writes
        elif op.function in VIEWS and op.reads[0] in roots:
            roots[op.writes] = roots[op.reads[0]]
    results = {roots.get(register) for register in returned}
    allocated = [op for op in ops if _allocates(op) and op.writes not in results]
    made = {op.writes: op for op in allocated if _nbytes(op) <= LARGEST}
    lives: dict[int, list[int]] = {}
    for at, op in enumerate(ops):
        for register in (*op.reads, *op.holds, op.writes):
            if roots.get(register) in made:
                lives.setdefault(roots[register], []).append(at)
    starts, nbytes = _packed({root: (_nbytes(made[root]), uses[0], uses[-1]) for root, uses in lives.items()})
    if nbytes > MOST:
        return Workspace((), (), 0), list(ops)
    left, views = list[Op](), list[Op]()
    for op in ops:
        if op.writes not in roots or roots[op.writes] not in starts:
            left.append(op)
        elif op.writes != roots[op.writes]:
            views.append(op)
        elif op.function.func is torch.zeros:  # type: ignore[attr-defined]
            left.append(Op(torch.Tensor.zero_, (op.writes,), op.writes))
    return Workspace(tuple((start, made[root]) for root, start in starts.items()), tuple(views), nbytes), left


def _packed(lives: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Return where each memory of (bytes, first use, last use) begins, and the bytes of all: the largest first."""
    placed: list[tuple[int, int, int, int]] = []
    starts: dict[int, int] = {}
    for register, (nbytes, first, last) in sorted(lives.items(), key=lambda life: -life[1][0]):
        start = 0
        for lo, hi, begins, ends in sorted(placed):
            if begins <= last and first <= ends and lo < start + nbytes and start < hi:
                start = -(-hi // _ALIGNMENT) * _ALIGNMENT
        placed.append((start, start + nbytes, first, last))
        starts[register] = start
    return starts, -(-max((hi for _, hi, _, _ in placed), default=0) // _ALIGNMENT) * _ALIGNMENT


def _allocates(op: Op) -> bool:
    return isinstance(op.function, partial) and op.function.func in (torch.empty_strided, torch.zeros)


def _layout(op: Op) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return shape, strides and dtype of an allocation."""
    assert isinstance(op.function, partial), "see _allocates"
    shape, *strides = op.function.args
    dense = torch.empty(shape, device="meta").stride()
    return shape, strides[0] if strides else dense, op.function.keywords["dtype"]


def _nbytes(op: Op) -> int:
    shape, strides, dtype = _layout(op)
    if not math.prod(shape):
        return 0
    return dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
