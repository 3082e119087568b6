"""Counts of this process: kernel calls, attentions, messages and bytes, for tests and reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


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
    """All-to-alls of heads and tokens: two a phase, where ulysses_degree > 1; not those that a CUDA graph replays."""
    ulysses_forward_bytes: int = 0
    """Bytes this rank sent to others in the all-to-alls of forwards; not part of `forward_bytes`."""
    ulysses_backward_bytes: int = 0
    state_exchanges: int = 0
    """All-gathers of recurrences: one per forward and one per backward, of states or of tokens before a convolution."""
    state_forward_bytes: int = 0
    """Bytes that this rank brought to the all-gathers of forwards; every other rank receives them."""
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
