"""What attention did in this process: counts, and a line that says how it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.environment import warn_of_untested

if TYPE_CHECKING:
    from dfa_megatron.runtime.prepare import Prepared

QUIET = "DFA_QUIET"
"""The environment variable that silences the line about how attention runs, if it is 1."""


@dataclass(slots=True)
class Counters:
    """Plain counts since the last reset; one instance per process (`COUNTERS`)."""

    attention_forwards: int = 0
    """Distributed forwards that ran (a replay is not one)."""
    attention_backwards: int = 0
    reused: int = 0
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

_counts_before: dict[str, int] = {}
_how: dict[str, str] = {}
"""Schedule, kernel and transport of the attention that was new last."""
_said: set[str] = set()


def describe(prepared: Prepared, device: torch.device) -> dict[str, str]:
    """Return schedule, kernel and transport of a prepared attention, and keep them for `stats`."""
    over, schedule, transport = prepared.over, prepared.schedule, Transport.name
    if over is None or prepared.ranks == 1:
        schedule = "one rank" if prepared.exchange is None else "head exchange"
    else:
        transport = over.transports.get(device, prepared.transport).name
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

    Replays of the caller's own CUDA graph are not counted.

    Returns:
        dfa/forwards, dfa/backwards: attentions that ran.
        dfa/sent_mib: sent by this rank. dfa/kept_mib: saved for recomputes. dfa/schedule, dfa/kernel, dfa/transport:
        text, of the attention that was new last.
    """
    counts = COUNTERS.snapshot()
    done = {name: n - (before if (before := _counts_before.get(name, 0)) <= n else 0) for name, n in counts.items()}
    _counts_before.update(counts)
    return {
        "dfa/forwards": done["attention_forwards"],
        "dfa/backwards": done["attention_backwards"],
        "dfa/sent_mib": sum(n for name, n in done.items() if name.endswith("ward_bytes")) / 2**20,
        "dfa/kept_mib": done["remat_bytes"] / 2**20,
        **{f"dfa/{name}": text for name, text in _how.items()},
    }
