"""Agreement: ranks compare an attention before they run it, and report differences instead of hanging."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from dfa_megatron.errors import DisagreementError
from dfa_megatron.runtime.agreement.board import Board, listed

Facts = dict[str, str]

SUBJECT = "prepare this attention"


def agree(facts: Facts, board: Board, timeout: float) -> None:
    """Compare facts across a group; a fact named "error" fails every rank with it.

    Args:
        facts: of this rank.
        board: of the group.
        timeout: seconds to wait for the other ranks.

    Raises:
        AbsentError: names the ranks that did not come in time.
        DisagreementError: a rank reported an error, or facts differ: the message is a table of the fields that do.
    """
    mine = _text(facts)
    # Facts are almost always equal. Then only a digest of each rank's has travelled.
    digests = board.collect(hashlib.sha256(mine.encode()).hexdigest(), timeout, SUBJECT)
    if len(set(digests)) == 1 and "error" not in facts:
        return
    everyone = exchange(facts, board, timeout)
    errors = [(rank, theirs["error"]) for rank, theirs in enumerate(everyone) if "error" in theirs]
    if errors:
        rank, reason = errors[0]
        raise DisagreementError(f"rank {rank} of the group refuses this attention: {reason}")
    fields = sorted({field for theirs in everyone for field in theirs})
    different = [field for field in fields if len({theirs.get(field) for theirs in everyone}) > 1]
    raise DisagreementError("the ranks of the group ask for different attentions:\n" + _table(different, everyone))


def exchange(facts: Facts, board: Board, timeout: float, subject: str = SUBJECT) -> list[Facts]:
    """Return every rank's facts, by rank. They travel as JSON text, never as pickles.

    Raises:
        AbsentError: names the ranks that did not come in time.
    """
    return [json.loads(text) for text in board.collect(_text(facts), timeout, subject)]


def _text(facts: Facts) -> str:
    return json.dumps(facts, sort_keys=True)


def _table(fields: list[str], everyone: list[Facts]) -> str:
    return "\n".join(f"  {field}: {by_rank([facts.get(field, '(nothing)') for facts in everyone])}" for field in fields)


def by_rank(values: Sequence[str]) -> str:
    """Return one line with each value and the ranks that have it; `values` are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on rank{'s' * (len(those) > 1)} {listed(those)}" for value, those in ranks.items())
