"""A candidate of `auto` with its cost, and which of several is taken."""

from __future__ import annotations

from dataclasses import dataclass

from dfa_megatron.plan.language.ir import AttentionPlan

TIE = 0.02
"""Plans whose times differ by less than this share are a tie. The order of `schedules.ALL` decides a tie."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of `auto`: its plan and its cost, or the reason for its refusal.

    device, host: seconds of forward and backward together, of the slowest rank; the two work at the same time.
    busy: mean seconds of compute. sent: the most bytes that one rank sends in both phases.
    slots: the most buffers of one rank in either phase. simulated: True by `simulate`; False by `outline`, where slots
    is 0.
    ulysses_degree: number of neighbours that exchange heads around the plan; times and `sent` include the exchange.
    refusal, instead: set in place of a plan; the reason, and an alternative.
    """

    schedule: str
    layout: str = "contiguous"
    plan: AttentionPlan | None = None
    refusal: str = ""
    instead: str = ""
    device: float = 0.0
    host: float = 0.0
    busy: float = 0.0
    sent: int = 0
    slots: int = 0
    simulated: bool = False
    ulysses_degree: int = 1

    @property
    def seconds(self) -> float:
        """Return the time of a call among others like it: a host issues the next one while its device computes."""
        return max(self.device, self.host)

    @property
    def idle_share(self) -> float:
        """Return the share of `seconds` in which devices do not compute."""
        return 1 - self.busy / self.seconds if self.seconds else 0.0

    @property
    def name(self) -> str:
        """Return the schedule, a layout other than contiguous, "gateway" if its route knows nodes, a degree above 1."""
        where = f" on {self.layout}" if self.layout != "contiguous" else ""
        nodes = ", gateway" if self.plan is not None and self.plan.ranks_per_node is not None else ""
        degree = f", ulysses {self.ulysses_degree}" if self.ulysses_degree > 1 else ""
        return f"{self.schedule}{where}{nodes}{degree}"


def best(looked_at: tuple[Candidate, ...]) -> Candidate | None:
    """Return the first candidate within TIE of the cheapest, or None if every candidate is refused."""
    served = [candidate for candidate in looked_at if candidate.plan]
    least = min((candidate.seconds for candidate in served), default=0.0)
    return next((candidate for candidate in served if candidate.seconds <= least * (1 + TIE)), None)
