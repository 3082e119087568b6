"""Agreement: the ranks of a group compare what they are about to run, and say what differs instead of hanging."""

from __future__ import annotations

import json
from datetime import timedelta

import torch
import torch.distributed as dist

from dfa_megatron.errors import DisagreementError

Facts = dict[str, str]


def agree(facts: Facts, group: dist.ProcessGroup, timeout: float) -> None:
    """Compare facts across a gloo group; a fact named "error" fails every rank with it. `timeout` is in seconds.

    Raises:
        DisagreementError: a rank reported an error, or facts differ: the message is a table of the fields that do.
    """
    everyone = exchange(facts, group, timeout)
    errors = [(rank, theirs["error"]) for rank, theirs in enumerate(everyone) if "error" in theirs]
    if errors:
        rank, reason = errors[0]
        raise DisagreementError(f"rank {rank} of the group refuses this attention: {reason}")
    fields = sorted({field for theirs in everyone for field in theirs})
    different = [field for field in fields if len({theirs.get(field) for theirs in everyone}) > 1]
    if different:
        raise DisagreementError("the ranks of the group ask for different attentions:\n" + _table(different, everyone))


def exchange(facts: Facts, group: dist.ProcessGroup, timeout: float) -> list[Facts]:
    """Every rank's facts, in group order. They travel as JSON text, never as pickles.

    Raises:
        DisagreementError: not every rank came within the timeout; the message says which, where that is known.
    """
    text = torch.frombuffer(bytearray(json.dumps(facts, sort_keys=True).encode()), dtype=torch.uint8)
    try:
        dist.monitored_barrier(group, timedelta(seconds=timeout), wait_all_ranks=True)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: text.numel()] = text
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, padded, group=group)
    except RuntimeError as error:
        raise DisagreementError(
            "not every rank of the group prepared this attention in time: the others may run another plan, have ended, "
            f"or never reached it. This rank asks for {facts}. What the network said: {error}"
        ) from error
    return [json.loads(bytes(t[: int(size)].tolist()).decode()) for t, size in zip(texts, sizes, strict=True)]


def _table(fields: list[str], everyone: list[Facts]) -> str:
    lines = []
    for field in fields:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            values.setdefault(facts.get(field, "(nothing)"), []).append(rank)
        told = "; ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {_ranks(ranks)}" for value, ranks in values.items())
        lines.append(f"  {field}: {told}")
    return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)} of them)"
