"""What can go wrong, by name: a plan that does not hold, a request nobody can serve, ranks that disagree."""

from __future__ import annotations


class DistAttentionError(Exception):
    """Base of every error this package raises on purpose."""


class PlanError(DistAttentionError, ValueError):
    """A plan breaks a rule of the plan language; the message names the rule, the rank and the step.

    Args:
        reason: what is wrong, in one sentence.
        picture: the plan's grid with the failing cell marked, where there is one.
    """

    def __init__(self, reason: str, picture: str = "") -> None:
        self.reason = reason
        self.picture = picture
        super().__init__(f"{reason}\n{picture}" if picture else reason)


class UnsupportedError(DistAttentionError, ValueError):
    """A request that is refused at set-up: what was asked, why it cannot be served, and what would work.

    A single argument is the whole message: frameworks (Megatron's build_module) and pickle make errors anew from that.
    """

    def __init__(self, what: str, why: str = "", instead: str = "") -> None:
        self.what, self.why, self.instead = what, why, instead
        super().__init__(f"Not supported: {what}: {why}. What works: {instead}." if why else what)


class DisagreementError(DistAttentionError, RuntimeError):
    """The ranks of a group asked for different things; the message is a table of the fields that differ."""


class AbsentError(DisagreementError):
    """A rank of a group did not come, does not answer, or has ended; the message names it and what was waited for."""


class LostGroupError(DistAttentionError, RuntimeError):
    """A group that failed before is asked for another attention; the message names the error that lost it."""


class ExecutionError(DistAttentionError, RuntimeError):
    """A step of a distributed attention failed; the message shows the plan's grid with the failing cell marked."""


class RematError(DistAttentionError, RuntimeError):
    """A recompute cannot use what the first pass of its region kept; the message says why and what to do."""


class ProofError(DistAttentionError, RuntimeError):
    """Many ranks do not compute what one rank computes; the message is the table of `prove`, the same on every rank."""
