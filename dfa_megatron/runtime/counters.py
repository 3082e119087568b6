"""What attention did in this process, as counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


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
HOW: dict[str, str] = {}
"""Schedule, kernel and transport of the attention that was new last."""


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
        **{f"dfa/{name}": text for name, text in HOW.items()},
    }
