"""What attention did in this process: counts, times of a sample of its calls, and a line that says how it runs."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from dfa_megatron.kernels.current_stream import current_stream
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.environment import warn_of_untested

if TYPE_CHECKING:
    from dfa_megatron.runtime.execute.memory import Fields, MemoryPlan
    from dfa_megatron.runtime.prepare import Prepared

    Run = Callable[[Prepared, MemoryPlan, Fields], Fields]

EVERY = 17
"""One forward and one backward of so many is timed; a prime, so that it is another layer's in each step."""

QUIET = "DFA_QUIET"
"""The environment variable that silences the line about how attention runs, if it is 1."""


@dataclass(slots=True)
class Counters:
    """Plain counts since the last reset; one instance per process (`COUNTERS`)."""

    attention_forwards: int = 0
    """Distributed forwards that ran (a replay is not one)."""
    attention_backwards: int = 0
    replays: int = 0
    """Attentions that a recomputation read from its frame instead of running them."""
    kernel_forwards: int = 0
    kernel_backwards: int = 0
    forward_messages: int = 0
    """Messages this rank sent in distributed forwards."""
    backward_messages: int = 0
    forward_bytes: int = 0
    """Bytes this rank sent in distributed forwards."""
    backward_bytes: int = 0
    ulysses_exchanges: int = 0
    """All-to-alls of heads and tokens: two a phase, where ulysses_degree > 1."""
    ulysses_forward_bytes: int = 0
    """Bytes this rank sent to others in the all-to-alls of forwards; not part of `forward_bytes`."""
    ulysses_backward_bytes: int = 0
    state_exchanges: int = 0
    """Exchanges of recurrences: one per forward and one per backward, of states or of tokens before a convolution."""
    state_forward_bytes: int = 0
    """Bytes that this rank brought in forwards: to all-gathers of states, and of tokens before a convolution."""
    state_backward_bytes: int = 0
    remat_bytes: int = 0
    """Bytes of (out, lse) and of states that frames have recorded."""

    def reset(self) -> None:
        """Set every count to zero."""
        for spec in fields(self):
            setattr(self, spec.name, 0)

    def snapshot(self) -> dict[str, int]:
        """Return the counts as a dictionary."""
        return asdict(self)


COUNTERS = Counters()


class _Stopwatch:
    """Marks on the stream that computes, or on a CPU's clock: the start, then two around each wait, then the end."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events, self.times = device, list[torch.cuda.Event](), list[float]()

    def mark(self) -> None:
        """Add a mark; the host does not wait."""
        if self.device.type != "cuda":
            self.times.append(1e3 * time.perf_counter())
            return
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record(current_stream(self.device))

    def milliseconds(self) -> tuple[float, float] | None:
        """Return the time of all and that of the waits; None while they last."""
        if self.events and not self.events[-1].query():
            return None
        marks = [self.events[0].elapsed_time(event) for event in self.events] or self.times
        waits = sum(end - start for start, end in zip(marks[1:-1:2], marks[2:-1:2], strict=True))
        return marks[-1] - marks[0], waits


class _Sample(NamedTuple):
    is_forward: bool
    flops: float
    watch: _Stopwatch


_samples: deque[_Sample] = deque(maxlen=256)
_counts_before: dict[str, int] = {}
_how: dict[str, str] = {}
"""Schedule, kernel and transport of the attention that was new last."""
_said: set[str] = set()


def timed(run: Run, prepared: Prepared, memory: MemoryPlan, inputs: Fields) -> Fields:
    """Run a phase, and note the time that it takes and that its stream waits for messages."""
    device, is_forward = inputs[0].device, memory is prepared.forward
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # events in a graph cannot be read
        return run(prepared, memory, inputs)
    watch = _Stopwatch(device)
    flops = prepared.pairs * prepared.sizes.flops_per_pair(FORWARD if is_forward else BACKWARD)
    watch.mark()
    Transport.mark = watch.mark
    try:
        results = run(prepared, memory, inputs)
    finally:
        Transport.mark = None
    watch.mark()
    _samples.append(_Sample(is_forward, flops, watch))
    return results


def describe(prepared: Prepared, device: torch.device) -> dict[str, str]:
    """Return schedule, kernel and transport of a prepared attention, and keep them for `stats`."""
    channel = prepared.channel
    transport = Transport.name if channel is None else channel.transports.name_of(device, prepared.transport)
    alone = "one rank" if prepared.exchange is None else "head exchange"
    schedule = alone if prepared.ranks == 1 else prepared.schedule
    _how.update(schedule=schedule, kernel=prepared.kernel.name, transport=transport)
    return _how


def say_how(prepared: Prepared, device: torch.device, *, saves: bool) -> None:
    """Print on global rank 0 how a new attention runs, each line once. saves: its results are saved for a recompute."""
    how, heads = describe(prepared, device), prepared.exchange
    if os.environ.get(QUIET) == "1" or (dist.is_initialized() and dist.get_rank()):
        return
    degree = 1 if heads is None else heads.heads.degree
    ranks = prepared.ranks * degree
    layout = prepared.request.layout
    layout = layout if isinstance(layout, str) else "contiguous" if layout.in_order else "chunks"
    words = [f"{ranks} ranks" if ranks > 1 else "1 rank", layout]
    words += [how["schedule"]] if ranks > degree else []
    words += [f"heads exchanged by {degree}"] if degree > 1 else []
    words += [f"{how['kernel']} over {how['transport']}" if ranks > degree else how["kernel"]]
    line = f"dfa: {', '.join(words + ['remat'] * saves)}"
    if line not in _said:
        _said.add(line)
        warn_of_untested()
        print(line, file=sys.stderr, flush=True)


def stats() -> dict[str, float | str]:
    """Return what attention did on this rank since the last call, for `wandb.log` or a SummaryWriter.

    One call in 17 is timed, by events on its own stream, and the host waits for none. An exchange of heads counts as
    computing; replays of the caller's own CUDA graph are not counted.

    Returns:
        dfa/forwards, dfa/backwards: attentions that ran. dfa/forward_ms, dfa/backward_ms: the mean of those timed.
        dfa/tflops: of this rank, while attention runs. dfa/waiting_percent: of that time, waiting for messages.
        dfa/sent_mib: sent by this rank. dfa/kept_mib: saved for recomputes. dfa/schedule, dfa/kernel, dfa/transport:
        text, of the attention that was new last. What was not measured is left out.
    """
    counts, over = COUNTERS.snapshot(), list[tuple[_Sample, float, float]]()
    done = {name: n - (before if (before := _counts_before.get(name, 0)) <= n else 0) for name, n in counts.items()}
    _counts_before.update(counts)
    while _samples and (found := _samples[0].watch.milliseconds()) is not None:
        over.append((_samples.popleft(), *found))
    result: dict[str, float | str] = {
        "dfa/forwards": done["attention_forwards"],
        "dfa/backwards": done["attention_backwards"],
        "dfa/sent_mib": sum(n for name, n in done.items() if name.endswith("ward_bytes")) / 2**20,
        "dfa/kept_mib": done["remat_bytes"] / 2**20,
    }
    for name, is_forward in (("forward", True), ("backward", False)):
        if times := [ms for sample, ms, _ in over if sample.is_forward == is_forward]:
            result[f"dfa/{name}_ms"] = sum(times) / len(times)
    if whole := sum(ms for _, ms, _ in over):
        result["dfa/tflops"] = sum(sample.flops for sample, _, _ in over) / whole / 1e9
        result["dfa/waiting_percent"] = 100 * sum(waits for _, _, waits in over) / whole
    return result | {f"dfa/{name}": text for name, text in _how.items()}
