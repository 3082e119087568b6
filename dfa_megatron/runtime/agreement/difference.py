"""The table of the first call in which ranks differ, from what they show each other of their last calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dfa_megatron.runtime.agreement.agree import by_rank
from dfa_megatron.runtime.agreement.board import listed
from dfa_megatron.runtime.agreement.calls import Calls

_SHOWN = 64
"""Calls that ranks show each other."""

Shown = dict[int, tuple[str, int]]
"""A rank's last calls: what each was, and its digest, by its number; empty from a rank that does not answer."""


def written(calls: Calls) -> str:
    """Return what a rank shows, as JSON."""
    recent = [(number, text, calls.at(number)) for number, text in calls.recent(_SHOWN)]
    return json.dumps([(number, text, call.digest) for number, text, call in recent if call is not None])


def read(text: str) -> Shown:
    """Return what `written` wrote."""
    return {number: (what, digest) for number, what, digest in json.loads(text)}


def first_difference(everyone: Sequence[Shown]) -> str:
    """Say at which call ranks first differ, and what each of them ran."""
    told = [rank for rank, shown in enumerate(everyone) if shown]
    common = max((min(everyone[rank]) for rank in told), default=1)
    for number in range(common, max((max(everyone[rank]) for rank in told), default=0) + 1):
        calls = [shown.get(number, ("has not come so far" if shown else "does not answer", 0)) for shown in everyone]
        if len({calls[rank] for rank in told}) > 1:
            ran = [text for text, _ in calls]
            if len(set(ran)) < len(set(calls)):  # they differ in what takes no words: slopes, a mask's tiles
                ran = [f"{text} (digest {digest:016x})" if digest else text for text, digest in calls]
            return (
                f"the ranks of the group run different attentions, after {number - 1} equal calls:\n"
                f"  call {number}: {by_rank(ran)}\n"
                "What ran from there on is wrong. Every rank must call attention in the same order"
            )
    if len(told) == len(everyone):
        return f"the ranks of the group have run different attentions, over {_SHOWN} calls ago: what ran since is wrong"
    silent = [rank for rank, shown in enumerate(everyone) if not shown]
    ran = [f"{shown[max(shown)][0]} (call {max(shown)})" if shown else "does not answer" for shown in everyone]
    return (
        "the ranks of the group run different attentions. In which call cannot be told: "
        f"rank{'s' * (len(silent) > 1)} {listed(silent)} ended or stopped before showing its calls. The last ones:\n"
        f"  {by_rank(ran)}\n"
        "What ran is wrong. Every rank must call attention in the same order"
    )
