"""The memory of one rank: the tensors of each name, where messages land, and where each that is sent goes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dfa_megatron.kernels.segments import Segments, Split
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.program import Call, Program
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.kernel_calls import Takes
from dfa_megatron.plan.lowering.landings import Arenas, landings_of
from dfa_megatron.plan.lowering.lower import lower
from dfa_megatron.runtime.cuda_driver import Copy

Fields = tuple[torch.Tensor, ...]
"""Tensors of a name."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a name: rows are (batch, rows, heads, width), a statistic (width 0) is (batch, heads, rows)."""

    name: str
    heads: int
    width: int
    dtype: torch.dtype

    def shape(self, batch: int, rows: int) -> tuple[int, ...]:
        """Return the tensor's shape for that many rows."""
        return (batch, rows, self.heads, self.width) if self.width else (batch, self.heads, rows)


def fields_of(sizes: Sizes, name: str, dtype: str) -> tuple[Field, ...]:
    """Return the tensors of a name in that dtype, statistics in the accumulator's.

    They travel and are returned in q's dtype. Only `ring` rounds a sum at every rank on its way; a wider wire takes
    15 % off the error of its dk and dv, and half as many bytes again.
    """
    number, statistic = getattr(torch, dtype), getattr(torch, sizes.accumulator)
    return tuple(
        Field(field, heads, width, number if width else statistic) for field, heads, width in sizes.fields(name)
    )


def rows_of(tensor: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    """Return rows lo..hi of a field (batch, rows, heads, width) or (batch, heads, rows)."""
    if tensor.dim() == 4:
        return tensor[:, lo:hi] if hi - lo != tensor.shape[1] else tensor
    return tensor[:, :, lo:hi] if hi - lo != tensor.shape[2] else tensor


def copy_of_rows(tensor: torch.Tensor, lo: int, hi: int, start: int, rows: int) -> Copy:
    """Return the copy of rows lo..hi of a dense field to byte `start`, into a field of `rows` rows."""
    assert tensor.is_contiguous(), "a rank's own rows are made dense before they are sent"
    count = tensor.shape[1] if tensor.dim() == 4 else tensor.shape[2]
    height = tensor.shape[0] if tensor.dim() == 4 else tensor.shape[0] * tensor.shape[1]
    row = tensor.nbytes // max(1, height * count)
    if (hi - lo) == count == rows:
        return Copy(0, start, tensor.nbytes)
    return Copy(lo * row, start, (hi - lo) * row, height, count * row, rows * row)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """The memory of one rank's program.

    arena_bytes: the largest arena that any rank needs for what lands there: equal on all ranks.
    landings: buffer -> the first bytes of its tensors in the arena, by name.
    offsets: (step, peer) of a message that this rank sends -> where in the peer's arena each of its tensors goes.
    segments: of each step's calls, in their order, as kernels take them.
    peers: the numbers in the group of the program's ranks.
    sent: names of which this rank sends its own rows.
    calls, messages, message_bytes: how many kernel calls this rank makes, and what it sends.
    """

    program: Program
    sizes: Sizes
    arena_bytes: int
    landings: Mapping[int, Mapping[str, Sequence[int]]]
    offsets: dict[tuple[int, int], tuple[int, ...]]
    segments: tuple[tuple[Segments, ...], ...]
    peers: Sequence[int]
    sent: frozenset[str]
    calls: int
    messages: int
    message_bytes: int

    def landed(self, arena: torch.Tensor) -> dict[int, dict[str, Fields]]:
        """Return the tensors of every received buffer in the bytes of an arena, by name."""

        def views(starts: Sequence[int], name: str, rows: int) -> Iterator[torch.Tensor]:
            for start, field in zip(starts, fields_of(self.sizes, name, self.sizes.sent_as(name)), strict=True):
                shape = field.shape(self.sizes.batch, rows)
                end = start + math.prod(shape) * field.dtype.itemsize
                yield arena[start:end].view(field.dtype).view(shape)

        return {
            number: {name: tuple(views(starts[name], name, rows)) for name, rows in self.program.buffers[number].parts}
            for number, starts in self.landings.items()
        }


def placed(plan: Plan, rank: int, sizes: Sizes, takes: Takes, peers: Sequence[int] | None = None) -> MemoryPlan:
    """Lower a phase for one rank, prove its program, place its messages and prove where they lie, or raise a PlanError.

    Each rank proves its own program; with one digest of the plan on all ranks, all are proved. All hear of an error.

    sizes: of the rank's tensors. takes: what one launch of the kernel computes. peers: the numbers in the group of the
    plan's ranks; None: the same.
    """
    from dfa_megatron.plan.proof.check import check_programs, prove_arena

    landings = landings_of(plan, sizes.batch)
    program = lower(landings[rank], takes)
    check_programs(landings, [program])
    row_bytes = {name: sizes.row_bytes(name) for _, name in (*plan.phase.reads, *plan.phase.writes)}
    arenas = Arenas(landings, row_bytes)
    prove_arena(program, arenas)
    sent = Counter[str]()
    for message in program.sends:
        for name, rows in message.signature:
            sent[name] += rows
    ragged = len(plan.mask.tiles) > 1
    return MemoryPlan(
        program,
        sizes,
        arenas.nbytes,
        arenas.starts_on(program.rank),
        arenas.sent_by(program.rank),
        tuple(tuple(_segments(call, ragged=ragged) for call in step.calls) for step in program.steps),
        range(plan.ranks) if peers is None else peers,
        frozenset(sent),
        sum(len(step.calls) for step in program.steps),
        len(program.sends),
        sum(rows * sum(row_bytes[name]) for name, rows in sent.items()),
    )


def _segments(call: Call, *, ragged: bool) -> Segments:
    q_len, kv_len = call.q.rows, call.kv.rows
    split = Split.of(call.launches, q_len, kv_len, ragged=ragged)
    return Segments(call.segments, q_len, kv_len, ragged=ragged, split=split)
