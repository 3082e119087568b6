"""The algebra of tensors: what one rank's program does to memory, with a kernel for every block."""

from __future__ import annotations

import torch

from dfa_megatron.kernels.api import BlockKernel, Saved
from dfa_megatron.kernels.merge import merge_, open_
from dfa_megatron.plan.program import Call, Fold, Message, Region, Write
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.memory import MemoryPlan, is_buffer
from dfa_megatron.runtime.wire import Views, rows_of

Fields = tuple[torch.Tensor, ...]


class Tensors:
    """One rank's memory and arithmetic for one run of one program.

    Everything is allocated before the first step: slots for what travels, accumulators for what is at home. Only a
    kernel's own outputs are allocated inside the loop (PyTorch's operators offer no other way).

    Args:
        memory: what will run, and the memory it needs.
        kernel: computes the blocks.
        home: this rank's own rows by read name, as `Format.fields` orders them.
        softmax_scale: of the scores.
        deterministic: passed on to the kernel's backward.
    """

    def __init__(
        self,
        memory: MemoryPlan,
        kernel: BlockKernel,
        home: dict[str, Fields],
        *,
        softmax_scale: float,
        deterministic: bool,
    ) -> None:
        self.memory, self.program, self.format, self.kernel = memory, memory.program, memory.format, kernel
        self.softmax_scale, self.deterministic = softmax_scale, deterministic
        self.forward = self.program.phase.name == "forward"
        self.device = next(iter(home.values()))[0].device
        self.adopts = memory.adopts
        self.views: dict[int, Views] = {}
        self.flat: dict[int, torch.Tensor] = {}
        self._take_in_home(home)
        self._allocate()

    def result(self, name: str) -> Fields:
        """The tensors of an accumulator at home, after the last step."""
        return self.views[self.program.home_buffer(name)][name]

    # The algebra.

    def begin(self, step: int) -> None:
        """Nothing to do: memory is where the program says."""

    def open(self, buffer: int) -> None:
        """Set an accumulator to the identity of its fold."""
        (fields,) = self.views[buffer].values()
        if self.forward:
            open_(*fields)
        else:
            for field in fields:
                field.zero_()

    def compute(self, call: Call) -> None:
        """One kernel call and the folds of its results."""
        q, (k, v) = self._fields(call.q), self._fields(call.kv)
        if self.forward:
            COUNTERS.kernel_forwards += 1
            partial = self.kernel.forward(q[0], k, v, band=call.band, softmax_scale=self.softmax_scale)
            self._store(call.writes[0], partial)
            return
        COUNTERS.kernel_backwards += 1
        rows, dout, lse, memory = q
        saved = Saved(lse, delta=memory) if self.format.reads == "delta" else Saved(lse, out=memory)
        dq, dk, dv = self.kernel.backward(
            dout,
            rows,
            k,
            v,
            saved,
            band=call.band,
            softmax_scale=self.softmax_scale,
            deterministic=self.deterministic,
        )
        self._store(call.writes[0], (dq,))
        self._store(call.writes[1], (dk, dv))

    def fold(self, fold: Fold) -> None:
        """A landed partial goes into an accumulator."""
        self._store(fold.write, self._fields(fold.source))

    def end(self, step: int) -> None:
        """Let go of adopted results whose message has left: their memory may be reused from here on."""
        for message in self.program.steps[step].sends:
            for regions in message.parts:
                for region in regions:
                    if region.buffer in self.adopts:
                        self.views.pop(region.buffer, None)

    # Messages.

    def outgoing(self, message: Message, staging: torch.Tensor) -> torch.Tensor:
        """The bytes of a message: the buffer itself where it is exactly the message, else packed into `staging`."""
        if is_buffer(self.program, self.format, self.adopts, message):
            number = message.parts[0][0].buffer
            slot = self.program.buffers[number].slot
            return self.flat[-1 - number if slot is None else slot]
        flat = staging[: self.format.nbytes(message.signature)]
        for name, targets in self.format.views(flat, message.signature).items():
            (regions,) = [part for part in message.parts if part[0].name == name]
            at = 0
            for region in regions:
                for target, source in zip(targets, self._fields(region), strict=True):
                    rows_of(target, at, at + region.rows).copy_(source)
                at += region.rows
        return flat

    def incoming(self, message: Message) -> torch.Tensor:
        """The memory that a message lands in."""
        slot = self.program.buffers[message.parts[0][0].buffer].slot
        assert slot is not None
        return self.flat[slot]

    def take(self, step: int, message: Message) -> torch.Tensor:
        """A copy of a message's bytes, for handing over inside one process."""
        staging = torch.empty(self.format.nbytes(message.signature), dtype=torch.uint8, device=self.device)
        return self.outgoing(message, staging).clone()

    def land(self, step: int, message: Message, payload: torch.Tensor) -> None:
        """Put handed-over bytes where the message says."""
        self.incoming(message).copy_(payload)

    # Memory.

    def _take_in_home(self, home: dict[str, Fields]) -> None:
        """Own rows: as given, or packed once into a flat buffer if they are sent."""
        for name, fields in home.items():
            number = self.program.home_buffer(name)
            if name not in self.memory.sent:
                self.views[number] = {name: fields}
                continue
            parts = self.program.buffers[number].parts
            flat = torch.empty(self.format.nbytes(parts), dtype=torch.uint8, device=self.device)
            self.views[number] = self.format.views(flat, parts)
            for target, source in zip(self.views[number][name], fields, strict=True):
                target.copy_(source)
            self.flat[-1 - number] = flat

    def _allocate(self) -> None:
        """Memory for every slot and home accumulator that is not adopted from a kernel's output."""
        for slot, size in self.memory.slots:
            self.flat[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        for number, buffer in enumerate(self.program.buffers):
            if number in self.views or number in self.adopts:
                continue
            if buffer.slot is not None:
                self.views[number] = self.format.buffer_views(self.flat[buffer.slot], buffer)
                continue
            # A result of the call: a tensor of its own per field, so that none keeps another's memory alive.
            ((name, rows),) = buffer.parts
            shapes = [(f.shape(self.format.batch, rows), f.dtype) for f in self.format.fields(name, buffer.accumulates)]
            self.views[number] = {name: tuple(torch.empty(s, dtype=d, device=self.device) for s, d in shapes)}

    def _fields(self, region: Region) -> Fields:
        fields = self.views[region.buffer][region.name]
        return tuple(rows_of(field, region.lo, region.hi) for field in fields)

    def _store(self, write: Write, partial: Fields) -> None:
        """Fold a partial into an accumulator; adopt it where nothing else will ever be folded there."""
        region = write.region
        if region.buffer in self.adopts:
            self.views[region.buffer] = {region.name: partial}
            return
        target = self._fields(region)
        if write.fresh:
            for into, value in zip(target, partial, strict=True):
                into.copy_(value)
        elif self.forward:
            merge_(*target, *partial)
        else:
            for into, value in zip(target, partial, strict=True):
                into.add_(value)
