"""Show why `auto` takes a schedule: a table of all candidates."""

from __future__ import annotations

from dfa_megatron.plan.cost.candidate import TIE, Candidate, best


def explain(looked_at: tuple[Candidate, ...]) -> str:
    """Format candidates as a table, the cheapest first, with the cost or the refusal of each.

    A star marks the choice of `auto`.
    """
    taken = best(looked_at)
    served = sorted((c for c in looked_at if c.plan), key=lambda candidate: candidate.seconds)
    width = max(len(candidate.name) for candidate in looked_at) + 2
    lines = [f"  {'schedule':{width}s} {'ms':>9s} {'idle':>6s} {'MB sent':>9s} {'slots':>5s}  why"]
    for candidate in served:
        slots = str(candidate.slots) if candidate.simulated else "-"
        cost = (
            f"{1e3 * candidate.seconds:9.3f} {100 * candidate.idle_share:5.1f}% {candidate.sent / 1e6:9.1f} {slots:>5s}"
        )
        star = "* " if candidate is taken else "  "
        lines.append(f"{star}{candidate.name:{width}s} {cost}  {_why(candidate, taken, served[0])}")
    out = [candidate for candidate in looked_at if not candidate.plan and candidate.ulysses_degree == 1]
    lines += [
        f"  {candidate.name:{width}s} {'-':>9s} {'':6s} {'':9s} {'':5s}  {candidate.refusal}" for candidate in out
    ]
    return "\n".join(lines)


def _why(candidate: Candidate, taken: Candidate | None, least: Candidate) -> str:
    more = candidate.seconds / least.seconds - 1 if least.seconds else 0.0
    if candidate is taken and candidate is least:
        return "taken: the cheapest"
    if candidate is taken and more <= TIE:
        return "taken: a tie with the cheapest, and simpler"
    return "a tie" if more <= TIE else f"{100 * more:.0f} % slower"
