"""Prepare each new request once: choose the kernel, plan, lower, prove, agree with all ranks, connect."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from dfa_megatron.kernels import BlockKernel
from dfa_megatron.names import say_once
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.comm.channel import Channel, tell
from dfa_megatron.runtime.comm.groups import channels
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.counters import HOW
from dfa_megatron.runtime.environment import warn_of_untested
from dfa_megatron.runtime.execute.bound import Bound
from dfa_megatron.runtime.execute.memory import MemoryPlan, placed
from dfa_megatron.runtime.execute.sinks import form_of
from dfa_megatron.runtime.planning import degree_of, kernel_of, plan_of, profile_of
from dfa_megatron.runtime.request import COMPARED, Inputs, Request

if TYPE_CHECKING:
    from dfa_megatron.runtime.around import ChunkMoves, HeadExchange

logger = logging.getLogger(__name__)

_KEPT = 64
"""Number of prepared attentions that a group keeps; the least recently used is dropped first.

The number is per group because all ranks of a group must drop the same one: a new one is agreed on by all of them.
"""

QUIET = "DFA_QUIET"
"""The environment variable that silences the line about how attention runs, if it is 1."""
_SAID: set[str] = set()

LARGEST_ARENA = 5 << 30
"""Bytes of symmetric memory up to which "auto" uses the copy engines; the memory stays between calls, see `KeptArena`.

Larger calls take seconds, so NCCL's messages cost them little, and NCCL's memory returns to PyTorch.
"""


class CallContexts(NamedTuple):
    """Contexts around a forward, a backward, and a forward alone, which no backward follows."""

    forward: AbstractContextManager[None]
    backward: AbstractContextManager[None]
    alone: AbstractContextManager[None]


_NOT_COUNTED = CallContexts(*(contextlib.nullcontext(),) * 3)


def _connect(prepared: Prepared, over: Channel, device: torch.device) -> None:
    """Open what messages need, or refuse the transport that was asked for; collective, after all ranks have agreed."""
    if prepared.exchange is not None:
        over.communicator(device)
    if prepared.ranks == 1:
        return
    asked, nbytes = prepared.request.config.transport, prepared.arena_bytes
    if prepared.transport != asked and device.type == "cuda":
        logger.info(
            "messages go point to point: they need %.1f GiB, which the copy engines would keep between calls",
            nbytes / 2**30,
        )
    over.transports.reserve(device, prepared.transport, nbytes)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that running one attention needs beside its tensors.

    ranks: of the plan. schedule, digest: of the plan, which `plan_again` makes.
    exchange: set if ulysses_degree > 1, see `runtime.around`. Then ranks and programs are those of one of the smaller
        attentions; request, over and running are the whole group's.
    moved: the rows that change ranks around it, so that chunks of a fixed order lie whole.
    binds: whether the kernel's work can be recorded and replayed.
    bound: recorded phases, by what they need of a call's tensors; None after a first run that was not recorded, a text
        if none can be.
    kind: what it has in common with the attention of other documents, masks and lengths.
    said: whether people were told how it runs, where its results are saved (False) or not (True).
    running: each context counts its call and loses the group on an error. A CPU compares calls at once. For a GPU the
        watch does; flags of the copy engines hold the call's token, so that data of another call are never read. With
        verify off they do nothing.
    forward, backward: this rank's programs, and their memory.
    over: the channel of the group, None for one rank.
    arena_bytes: of receive memory: the larger of forward and backward. Equal on all ranks.
    transport: the transport to request. "auto" becomes "p2p" if the messages need more than LARGEST_ARENA.
    """

    request: Request
    ranks: int
    kernel: BlockKernel
    schedule: str
    digest: str
    forward: MemoryPlan
    backward: MemoryPlan
    plan_again: Callable[[], AttentionPlan]
    over: Channel | None
    moved: ChunkMoves | None
    binds: bool
    kind: tuple[object, ...]
    arena_bytes: int
    transport: str
    exchange: HeadExchange | None = None
    bound: dict[tuple[object, ...], Bound | str | None] = field(default_factory=dict, compare=False, repr=False)
    said: set[bool] = field(default_factory=set, compare=False, repr=False)
    running: CallContexts = _NOT_COUNTED

    @property
    def plan(self) -> AttentionPlan:
        """The whole plan, for pictures and reports; made again, because it may have thousands of blocks."""
        return self.request.plan or self.plan_again()

    def say_how(self, device: torch.device, *, saves: bool) -> None:
        """Print on global rank 0 how it runs, each line once. saves: its results are saved for a recompute."""
        if saves in self.said:
            return
        self.said.add(saves)
        several, transport = self.over is not None and self.ranks > 1, Transport.name
        schedule = self.schedule if several else "one rank" if self.exchange is None else "head exchange"
        if self.over is not None and several:
            transport = self.over.transports.get(device, self.transport).name
        HOW.update(schedule=schedule, kernel=self.kernel.name, transport=transport)
        if os.environ.get(QUIET) == "1" or (dist.is_initialized() and dist.get_rank()):
            return
        degree = 1 if self.exchange is None else self.exchange.heads.degree
        ranks, layout = self.ranks * degree, self.request.layout
        layout = layout if isinstance(layout, str) else "contiguous" if layout.in_order else "chunks"
        words = [f"{ranks} ranks" if ranks > 1 else "1 rank", layout]
        words += [schedule] if ranks > degree else []
        words += [f"heads exchanged by {degree}"] if degree > 1 else []
        words += [f"{self.kernel.name} over {transport}" if ranks > degree else self.kernel.name]
        line = f"dfa: {', '.join(words + ['remat'] * saves)}"
        if line not in _SAID:
            _SAID.add(line)
            warn_of_untested()
            print(line, file=sys.stderr, flush=True)

    def picture(self, phase: str, step: int) -> str:
        """The grid of a phase with a step of this rank marked."""
        plan = self.plan.forward if phase == "forward" else self.plan.backward
        return grid(plan, mark=(step, self.forward.program.rank))


def made(request: Request, over: Channel | None, inputs: Inputs) -> Prepared:
    """Prepare without asking the other ranks, with or without an exchange of heads; refuse what nothing serves."""
    rank, size = (over.rank, over.size) if over is not None else (0, 1)
    request, mask, held = request.settled(size, rank, inputs)
    if (degree := degree_of(request, mask, over, inputs)) == 1:
        return built(request, mask, held, rank, inputs, over, range(size))
    from dfa_megatron.runtime import around  # which other calls need not load

    return around.made(degree, request, mask, held, over, inputs)


def build(request: Request, ranks: int, rank: int, inputs: Inputs) -> Prepared:
    """Prepare for one of so many ranks that need not be there, without an exchange of heads; errors as of `made`."""
    return built(*request.settled(ranks, rank, inputs), rank, inputs, None, range(ranks))


def built(
    request: Request, mask: Mask, held: Layout, rank: int, inputs: Inputs, over: Channel | None, peers: range
) -> Prepared:
    """Prepare for one of the ranks of a layout, without an exchange of heads. peers: their numbers in the group."""
    ranks, device = held.ranks, inputs.q.device
    kernel, sizes, takes, leaves = kernel_of(request, mask, ranks, inputs)
    hardware = profile_of(inputs.q.is_cuda, over, kernel.name, ranks)
    plan = plan_of(request, mask, held, sizes, hardware, leaves)
    forward, backward = (placed(phase, rank, sizes, takes, peers) for phase in plan.phases)
    needed = max(forward.arena_bytes, backward.arena_bytes)
    needed = _roomy(needed) if request.cu_seqlens else needed
    moved, common = None, [getattr(request, name) for name in COMPARED]
    if request.invariant:
        from dfa_megatron.runtime.around import rows_to_chunks  # which other calls need not load

        moved = rows_to_chunks(held, plan.forward.layout, rank, device, over if ranks > 1 else None, peers)
    transport = request.config.transport
    return Prepared(
        request=request,
        ranks=ranks,
        kernel=kernel,
        schedule=plan.schedule,
        digest=plan.digest,
        forward=forward,
        backward=backward,
        # Without the mask, which keeps what follows from it.
        plan_again=lambda: plan_of(
            request, request.mask_over(held.length, held.queries), held, sizes, hardware, leaves
        ),
        over=over,
        moved=moved,
        binds=kernel.replays(deterministic=request.deterministic),
        kind=(*common, request.config, ranks, device, *[(x.dtype, x.shape[0], x.shape[2:]) for x in inputs[:3]]),
        arena_bytes=needed,
        transport="p2p" if transport == "auto" and needed > LARGEST_ARENA else transport,
    )


_ALONE: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()
"""The prepared attentions of one rank: plans are the same over every group of one."""


def in_use() -> tuple[Prepared, ...]:
    """What this process has prepared; of a group, the one it used last at the end."""
    return (*_ALONE.values(), *(prepared for over in channels() for prepared in list(over.prepared.values())))


def prepare(request: Request, over: Channel | None, inputs: Inputs, *, trains: bool = True) -> Prepared:
    """Return the prepared attention of a request on tensors like these; collective over the group if it is new.

    All ranks raise where nothing serves the request of one, or they ask for different things. trains: whether a
    backward may follow, compared then and in each call.
    """
    q, k, v, sinks = inputs
    known = _ALONE if over is None else over.prepared
    of_sinks = sinks is not None and form_of(sinks)
    key = (request, q.device, q.dtype, k.dtype, v.dtype, q.shape, k.shape, v.shape, of_sinks)
    if (prepared := known.get(key)) is not None:
        known.move_to_end(key)
        return prepared
    prepared = made(request, None, inputs) if over is None else _prepare_together(request, over, inputs, trains=trains)
    known[key] = prepared
    if len(known) > _KEPT:
        known.popitem(last=False)
    return prepared


def _digest(prepared: Prepared, inputs: Inputs, over: Channel) -> bytes:
    """Return a digest of a rank's part in the first call of its kind; b"" where its tokens are alike, or none."""
    kinds = [known.kind for known in over.prepared.values()]
    if prepared.kind in kinds or (inputs.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return b""
    sums = [x.detach().sum((0, 2, 3), dtype=torch.float64).cpu() for x in inputs[:3]]
    if all(x.allclose(x[:1], rtol=1e-9, atol=0) for x in sums):
        return b""
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in sums)).digest()


def _prepare_together(request: Request, over: Channel, inputs: Inputs, *, trains: bool) -> Prepared:
    """Build, and let every rank know of an error on any: nobody is left waiting. Then connect."""
    device = inputs.q.device
    with over.calls.preparing() if over.verified else contextlib.nullcontext():
        try:
            prepared = made(request, over, inputs)
            part = _digest(prepared, inputs, over)
        except Exception as error:
            if over.verified:
                tell(error, over)
            raise
        if over.verified:
            # Attentions of one group must start from one thread: calls from two would have no common order.
            facts = prepared.request.facts(inputs) | {"thread": over.calls.thread, "device": over.place(device)}
            facts |= {"plan": f"{prepared.schedule}, digest {prepared.digest}", "kernel": prepared.kernel.name}
            parts = over.agree(facts | {"requires_grad": f"{trains}, for any of the inputs"}, part)
            if part and len({*parts}) == 1:
                said = "q, k and v are the same on all ranks of a group: each takes its own part, as of shard_sequence"
                say_once(logger.warning, said)
            if request.verify:
                text, compared = prepared.request.described(facts), json.dumps(facts, sort_keys=True)
                backward = over.running(Kind.of(f"backward of {text}", compared), device, ends=True)
                forward, alone = (
                    over.running(Kind.of(f"forward of {text}{more}", compared), device)
                    for more in ("", ", requires_grad=False")
                )
                prepared = replace(prepared, running=CallContexts(forward, backward, alone))
        with over.collective():
            _connect(prepared, over, device)
    return prepared


def _roomy(nbytes: int) -> int:
    """Round up by at most half: every pack needs a little more or less, and growing is collective."""
    step = 1 << max(0, nbytes.bit_length() - 2)
    return -(-nbytes // step) * step
