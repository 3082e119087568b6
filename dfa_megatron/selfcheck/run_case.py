"""Run a case on one rank, then on many, and report how they compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.selfcheck.case import Case
from dfa_megatron.selfcheck.compare import Comparison, Difference, compare
from dfa_megatron.selfcheck.processes import Outcome, World, run

RIGHT, DIFFERS, UNCHECKED = 0, 1, 2
"""Exit statuses: equal, different, and what cannot be checked (an `UnsupportedError`)."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a self-check; `table.text` prints it."""

    case: Case
    comparison: Comparison

    @property
    def status(self) -> int:
        """RIGHT or DIFFERS."""
        return DIFFERS if self.comparison.differences else RIGHT


def check(case: Case) -> Report:
    """Run one rank and many, and compare.

    Raises:
        UnsupportedError: the configuration is refused, or the framework cannot run it on one rank on a CPU.
    """
    return check_planted(case, [()])[0]


def check_planted(case: Case, plants: Sequence[Sequence[Callable[[], None]]]) -> list[Report]:
    """Check once for each list of functions, which every rank of the distributed run calls first.

    For tests of the self-check: a function at the top level of a module that can be imported breaks something there.
    """
    whole = World("one", 1, True, tuple(dict.fromkeys(case.sections.values())))
    worlds = [
        World(
            f"many{i}",
            case.ranks,
            False,
            tuple(case.sections),
            tuple(f"{f.__module__}:{f.__qualname__}" for f in planted),
        )
        for i, planted in enumerate(plants)
    ]
    found = run(case, [whole, *worlds])
    _refuse(found["one"], one=True)
    reports = []
    for world in worlds:
        outcome = found[world.name]
        if not outcome.failures:
            compared = compare(case, found["one"].recordings[0], outcome.recordings)
        else:
            _refuse(outcome, one=False)
            said = "\n".join(failure.said for failure in outcome.failures)
            compared = Comparison(differences=[Difference("", "the run", said)])
        reports.append(Report(case, compared))
    return reports


def _refuse(outcome: Outcome, *, one: bool) -> None:
    """Tell a refusal, on any number of ranks, and any failure of one rank, as what cannot be checked."""
    for failure in outcome.failures:
        if failure.kind == UnsupportedError.__name__:
            raise UnsupportedError(failure.last_line.partition(": ")[2])
    if one and outcome.failures:
        raise UnsupportedError(
            "this configuration in a self-check",
            f"the reference, one rank on a CPU, failed: {outcome.failures[0].said}",
            "a configuration that the framework can run there",
        )
