"""The algebra of tensors: run one rank's program on memory, with a kernel for every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dfa_megatron.kernels.api import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.interpret import Accumulator
from dfa_megatron.plan.language.program import Buffer, Call, Merge, Message, Region
from dfa_megatron.runtime.comm.memory.arena import Arena
from dfa_megatron.runtime.execute.accumulators import TensorMemory
from dfa_megatron.runtime.execute.alibi_positions import GlobalBias
from dfa_megatron.runtime.execute.memory_plan import MemoryPlan
from dfa_megatron.runtime.execute.wire_format import Fields, rows_of


class Tensors:
    """One rank's memory and arithmetic for one run of one program.

    Args:
        memory: the program and the memory it needs.
        kernel: computes the calls.
        home: this rank's own rows by read name, as `Format.fields` orders them.
        arena: where messages land, at least `memory.arena_bytes` large.
        softmax_scale, softcap, deterministic: of every call; see `BlockCall`.
        bias: of ALiBi, or None.
    """

    def __init__(
        self,
        memory: MemoryPlan,
        kernel: BlockKernel,
        home: dict[str, Fields],
        arena: Arena,
        *,
        softmax_scale: float,
        softcap: float = 0.0,
        deterministic: bool = False,
        bias: GlobalBias | None = None,
    ) -> None:
        self.memory, self.program, self.format, self.kernel = memory, memory.program, memory.format, kernel
        self.softmax_scale, self.softcap, self.deterministic = softmax_scale, softcap, deterministic
        self.bias = bias
        self._segments: Iterator[Segments] = iter(())
        self.forward = self.program.phase.name == "forward"
        self.device = arena.flat.device
        self.read: dict[int, dict[str, Fields]] = {}
        for name, fields in home.items():
            # A message must be dense: make it so once for all receivers.
            dense = tuple(x.contiguous() for x in fields) if name in memory.sent else fields
            self.read[self.program.home_buffer(name)] = {name: dense}
        self.read.update(arena.kept(memory, memory.landed))
        self.write = {
            number: self._accumulators(buffer)
            for number, buffer in enumerate(self.program.buffers)
            if buffer.merges is not None
        }

    def result(self, name: str) -> Fields:
        """Return the tensors of this rank's own accumulator, after the last step."""
        return self._result(self.program.home_buffer(name))

    # The algebra.

    def begin(self, step: int) -> None:
        """Take the segments of the step's calls; memory is where the program says."""
        self._segments = iter(self.memory.segments[step])

    def compute(self, call: Call) -> None:
        """Run one kernel call and write its results."""
        (q, *known), (k, v) = self.fields(call.q), self.fields(call.kv)
        segments = next(self._segments)
        assert segments.parts is call.segments, "a step's calls run in their order"
        alibi = None if self.bias is None else self.bias.of(call)
        block = BlockCall(q, k, v, segments, self.softmax_scale, self.softcap, alibi, self.deterministic)
        if self.forward:
            self._write(call.writes[0], self.kernel.forward(block))
            return
        dout, lse, row_stat = known
        saved = Saved(lse, row_stat) if self.format.backward_needs == "delta" else Saved(lse, out=row_stat)
        dq, dk, dv = self.kernel.backward(block, dout, saved)
        for region, gradients in zip(call.writes, ((dq,), (dk, dv)), strict=True):
            self._write(region, gradients)

    def merge(self, merge: Merge) -> None:
        """Merge a landed partial into an accumulator."""
        self._write(merge.write, self.fields(merge.source))

    def end(self, step: int) -> None:
        """Free the results that were sent: their memory may be reused from here on."""
        for message in self.program.steps[step].sends:
            for regions in message.parts:
                for region in regions:
                    self.write.pop(region.buffer, None)

    def fields(self, region: Region) -> Fields:
        """Return the tensors of some rows of a name."""
        there = self.read.get(region.buffer)
        fields = there[region.name] if there is not None else self._result(region.buffer)
        return tuple(rows_of(field, region.lo, region.hi) for field in fields)

    # Messages.

    def outgoing(self, message: Message) -> list[torch.Tensor]:
        """Return the dense tensors of a message in the order of sending; nothing is copied that is dense already."""
        tensors: list[torch.Tensor] = []
        for regions in message.parts:
            fields = [self.fields(region) for region in regions]
            if len(fields) == 1:
                tensors += (x.contiguous() for x in fields[0])
            else:
                tensors += (torch.cat(xs, dim=1 if xs[0].dim() == 4 else 2) for xs in zip(*fields, strict=True))
        return tensors

    def incoming(self, message: Message) -> list[torch.Tensor]:
        """Return the memory that a message lands in, tensor by tensor."""
        return [
            rows_of(x, region.lo, region.hi)
            for (region,) in message.parts
            for x in self.read[region.buffer][region.name]
        ]

    def take(self, step: int, message: Message) -> list[torch.Tensor]:
        """Copy a message, to hand it over inside one process."""
        return [x.clone() for x in self.outgoing(message)]

    def land(self, step: int, message: Message, payload: Sequence[torch.Tensor]) -> None:
        """Write a message that was handed over to its place."""
        for into, value in zip(self.incoming(message), payload, strict=True):
            into.copy_(value)

    def _accumulators(self, buffer: Buffer) -> list[Accumulator[Fields]]:
        """Return one for (out, lse), or one for each gradient: its partials are freed before the next needs a sum."""
        ((name, rows),) = buffer.parts
        assert buffer.merges is not None
        sums, results = self.format.sums(name), self.format.fields(name)
        size = len(results) if self.forward else 1
        return [
            Accumulator(
                buffer.merges,
                rows,
                TensorMemory(self.format.batch, sums[at : at + size], results[at : at + size], self.device),
            )
            for at in range(0, len(results), size)
        ]

    def _write(self, into: Region, partial: Fields) -> None:
        accumulators = self.write[into.buffer]
        size = len(partial) // len(accumulators)
        for at, accumulator in enumerate(accumulators):
            accumulator.write(partial[at * size : (at + 1) * size])

    def _result(self, buffer: int) -> Fields:
        return tuple(x for accumulator in self.write[buffer] for x in accumulator.result())
