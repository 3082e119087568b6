"""Run one rank's program over tensors: its buffers, kernel calls and accumulators, and where an error happened."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.merge import add, identity_, merge
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.tape import call_recorded
from dfa_megatron.plan.interpret import Accumulator, accumulator_of, rank_loop
from dfa_megatron.plan.language.program import Buffer, Call, Merge, Message, Region, Step
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport
from dfa_megatron.runtime.cuda_driver import Copy
from dfa_megatron.runtime.execute.bound import Failed
from dfa_megatron.runtime.execute.memory import Field, Fields, MemoryPlan, copy_of_rows, fields_of, rows_of
from dfa_megatron.runtime.request import Request


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """Tensors that are merged in one pass: (out, lse), or one gradient.

    sums, results: the tensors of a sum and of the result. device: of all.
    """

    batch: int
    sums: tuple[Field, ...]
    results: tuple[Field, ...]
    device: torch.device

    @property
    def in_place(self) -> bool:
        """Whether the sum has the result's dtype."""
        return self.sums == self.results

    def new(self, rows: int, sum: bool) -> Fields:
        fields = self.sums if sum else self.results
        return tuple(torch.empty(f.shape(self.batch, rows), dtype=f.dtype, device=self.device) for f in fields)

    def part(self, rows: Fields, lo: int, hi: int) -> Fields:
        return tuple(rows_of(x, lo, hi) for x in rows)

    def merge(self, parts: list[Fields], into: Fields) -> None:
        """Merge (out, lse); add gradients; copy a single part."""
        if len(parts) == 1:
            for x, value in zip(into, parts[0], strict=True):
                if not _is_there(value, x):
                    x.copy_(value)
        elif len(into) == 2:
            merge([(out, lse) for out, lse in parts], (into[0], into[1]))
        else:
            add([x for (x,) in parts], into[0])

    def clear(self, rows: Fields) -> None:
        """Set out to 0 and lse to -inf, a gradient to 0."""
        if len(rows) == 2:
            identity_(*rows)
        else:
            rows[0].zero_()

    def fits(self, partial: Fields, rows: int) -> bool:
        """Return whether the partial is like a fresh result."""
        return all(
            x.dtype == field.dtype and x.shape == field.shape(self.batch, rows) and x.is_contiguous()
            for x, field in zip(partial, self.results, strict=True)
        )


def _is_there(value: torch.Tensor, x: torch.Tensor) -> bool:
    """Return whether a kernel has written its result to where it belongs."""
    same = value.untyped_storage()._cdata == x.untyped_storage()._cdata
    return same and value.storage_offset() == x.storage_offset()


class Tensors:
    """One rank's memory and arithmetic for one run of one program.

    home: this rank's own rows by read name, as `Sizes.fields` orders them. arena: where messages land, at least
    `memory.arena_bytes` large.
    """

    def __init__(
        self,
        memory: MemoryPlan,
        kernel: BlockKernel,
        request: Request,
        home: dict[str, Fields],
        arena: torch.Tensor,
    ) -> None:
        self.memory, self.program, self.sizes, self.kernel = memory, memory.program, memory.sizes, kernel
        self.numbers = request.softmax_scale, request.softcap, request.deterministic
        self._segments: Iterator[Segments] = iter(())
        self.forward = self.program.phase.name == "forward"
        self.device = arena.device
        self.read: dict[int, dict[str, Fields]] = {}
        for name, fields in home.items():
            # A message must be dense: make it so once for all receivers.
            dense = tuple(x.contiguous() for x in fields) if name in memory.sent else fields
            self.read[self.program.home_buffer(name)] = {name: dense}
        self.read.update(memory.landed(arena))
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
        assert (segments.q_len, segments.kv_len) == (call.q.rows, call.kv.rows), "a step's calls run in their order"
        into = self._destinations(call) if self.kernel.writes_into else ()
        block = BlockCall(q, k, v, segments, *self.numbers, into)
        if self.forward:
            self._write(call.writes[0], self.kernel.forward(block))
            return
        dout, lse, out_or_delta = known
        saved = Saved(lse, out=out_or_delta) if out_or_delta.dim() == dout.dim() else Saved(lse, out_or_delta)
        dq, dk, dv = self.kernel.backward(block, dout, saved)
        of_q, of_keys = call.writes
        self._write(of_q, (dq,))
        self._write(of_keys, (dk, dv))

    def merge(self, merge: Merge) -> None:
        self._write(merge.write, self.fields(merge.source))

    def end(self, step: int) -> None:
        """Free the results that were sent: their memory may be reused from here on."""
        for message in self.program.steps[step].sends:
            for regions in message.parts:
                for region in regions:
                    self.write.pop(region.buffer, None)

    def fields(self, region: Region) -> Fields:
        """Return the tensors of some rows of a name."""
        return tuple(rows_of(field, region.lo, region.hi) for field in self._held(region))

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

    def copies(self, message: Message, starts: Sequence[int]) -> tuple[list[torch.Tensor], list[Copy]]:
        """Return the tensors that hold a message's rows, and what to copy from each, so that nothing is packed.

        starts: where each tensor of the message begins in the peer's arena.
        """
        tensors, copies, left = list[torch.Tensor](), list[Copy](), iter(starts)
        for regions in message.parts:
            rows = sum(region.rows for region in regions)
            for held in zip(*(self._held(region) for region in regions), strict=True):
                start = next(left)
                for region, x in zip(regions, held, strict=True):
                    tensors.append(x)
                    copies.append(copy_of_rows(x, region.lo, region.hi, start, rows))
                    start += copies[-1].width
        return tensors, copies

    def incoming(self, message: Message) -> list[torch.Tensor]:
        """Return the memory that a message lands in, tensor by tensor."""
        return [
            rows_of(x, region.lo, region.hi)
            for (region,) in message.parts
            for x in self.read[region.buffer][region.name]
        ]

    def _accumulators(self, buffer: Buffer) -> list[Accumulator[Fields]]:
        """Return one for (out, lse), or one for each gradient: its partials are freed before the next needs a sum."""
        ((name, rows),) = buffer.parts
        assert buffer.merges is not None
        leaves = buffer.slot is not None  # for another rank
        own = self.sizes.sent_as(name) if leaves else self.sizes.dtype
        partials, results = fields_of(self.sizes, name, self.sizes.accumulator), fields_of(self.sizes, name, own)
        size = len(results) if self.forward else 1
        return [
            accumulator_of(
                buffer.merges,
                rows,
                TensorMemory(self.sizes.batch, partials[at : at + size], results[at : at + size], self.device),
            )
            for at in range(0, len(results), size)
        ]

    def _destinations(self, call: Call) -> tuple[torch.Tensor | None, ...]:
        """Return memory for out, or for dq, dk and dv: None where a result is merged, divided, or has another dtype."""
        found, own = list[torch.Tensor | None](), getattr(torch, self.sizes.dtype)
        for region in call.writes:
            for accumulator in self.write[region.buffer]:
                place = accumulator.destination()
                fits = place is not None and place[0].shape[1] == region.rows and place[0].dtype == own
                found.append(place[0] if place is not None and fits else None)
        return tuple(found)

    def _write(self, into: Region, partial: Fields) -> None:
        accumulators = self.write[into.buffer]
        size = len(partial) // len(accumulators)
        for at, accumulator in enumerate(accumulators):
            accumulator.write(partial[at * size : (at + 1) * size])

    def _held(self, region: Region) -> Fields:
        """Return all rows of the region's buffer and name."""
        there = self.read.get(region.buffer)
        return self._result(region.buffer) if there is None else there[region.name]

    def _result(self, buffer: int) -> Fields:
        return tuple(x for accumulator in self.write[buffer] for x in accumulator.result())


def execute(tensors: Tensors, transport: Transport, failed: Failed) -> None:
    """Run a program to its end over this rank's memory, while a transport moves the messages.

    An error of a step is the ExecutionError that `failed` makes of it. With verify on, `Prepared.running` marks the
    group as lost.
    """
    transport.start()
    number, phase, (opens, closes) = 0, tensors.program.phase.name, _ranges(tensors.device)
    peers = tensors.memory.peers
    _marked(opens, f"dfa {phase}")
    try:
        for kind, number, step in rank_loop(tensors.program, tensors):
            if kind == "post":
                if number:
                    transport.computed(number - 1)
                    _marked(closes)
                _marked(opens, f"dfa {phase} step {number}")
                if step.sends or step.receives:
                    receives = [Recv(peers[message.peer], tensors.incoming(message)) for message in step.receives]
                    transport.post(step.after, functools.partial(_sends, tensors, number, step), receives)
            elif step.sends or step.receives:
                transport.land()
        transport.finish()
        _marked(closes)
        _marked(closes)
    except Exception as error:
        raise failed(number, error) from error


def _sends(tensors: Tensors, number: int, step: Step, packed: bool) -> list[Send]:
    """Return the messages of a step: packed, or as copies where the transport gathers rows itself."""
    peers, starts = tensors.memory.peers, tensors.memory.offsets
    if packed:
        return [Send(peers[m.peer], tensors.outgoing(m)) for m in step.sends]
    return [Send(peers[m.peer], *tensors.copies(m, starts[number, m.peer])) for m in step.sends]


def _marked(mark: Callable[..., object] | None, *name: str) -> None:
    """Open or close a range, and have a replay do so too."""
    if mark is not None:
        call_recorded(functools.partial(mark, *name))


def _ranges(device: torch.device) -> tuple[Callable[..., object] | None, Callable[..., object] | None]:
    """Return what opens and closes named ranges for NVIDIA's profilers, around phases and steps; none on a CPU."""
    # Past torch.cuda.nvtx, which formats the name in each call.
    nvtx = getattr(torch._C, "_nvtx", None) if device.type == "cuda" else None
    return (nvtx.rangePushA, nvtx.rangePop) if nvtx else (None, None)
