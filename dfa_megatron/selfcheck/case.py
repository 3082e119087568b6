"""Describe a self-check as plain data, which other processes receive as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-4
"""Of models whose numbers are sums in float32."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One thing that the check runs smaller, or otherwise, than the user asked for."""

    what: str
    asked: str
    runs: str


class Reductions(list[Reduction]):
    """Everything that the check runs smaller or otherwise."""

    def note(self, what: str, asked: object, runs: object) -> None:
        """Add a line, unless both are the same; True reads as "on"."""
        said, done = ("on" if value is True else str(value) for value in (asked, runs))
        if said != done:
            self.append(Reduction(what, said, done))


@dataclass(frozen=True, slots=True)
class Case:
    """One self-check.

    A rank process calls `measure(settings, sections, whole, recorder)`: the settings below, the names of the sections
    to run, whether it is the only rank, and a `Recorder` that takes what is compared. The default process group stands,
    with gloo. The one-rank run must not use what is checked: it is the framework's own attention, or a dense one.
    """

    title: str
    """The model in one line."""
    ranks: int
    measure: str
    """`module:function`, the function at the module's top level."""
    settings: Mapping[str, Any]
    """Arguments of the function, as JSON can say them."""
    sections: Mapping[str, str]
    """Parts of the run, and for each the part of the one-rank run that it must equal; the first difference counts."""
    reduced: Sequence[Reduction] = ()
    unseen: Sequence[str] = ()
    """Anything that the check does not look at, one line each."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Facts beside tensors that every rank of the distributed run must record with `Recorder.fact`."""
    imports: tuple[str, ...] = ()
    """Modules that the rank processes need and that take long to import: they are imported once for all."""
    tolerance: float = TOLERANCE
    """Largest |difference| over the largest entry of the whole tensor."""
    timeout: float = 0.0
    """Seconds for the processes of one world; 0 for 30 a rank, because all may share one core, and at least 300."""

    @property
    def seconds(self) -> float:
        """The timeout that applies."""
        return self.timeout or max(300.0, 30.0 * self.ranks)
