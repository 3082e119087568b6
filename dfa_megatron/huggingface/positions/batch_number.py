"""A number made of a whole batch, by which the ranks of a group find that their parts are of the same samples.

`shard_batch` adds it to the part; a part is known by it. The model's forward takes it out and compares it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.layout import Layout, contiguous
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.agreement.store import listed
from dfa_megatron.runtime.comm.groups import channel_of

KEY = "dfa_batch_number"
"""The key of a part of a batch, and of a call."""

REFUSED = 3
"""The `kind` of a call that its rank refuses: `check_same` tells those that wait in theirs."""

_COMPARES = Kind.of("compares its batch with those of the other ranks")

_ODD = (-7046029254386353131, 0x2545F4914F6CDD1D)
"""Factors that spread numbers over 64 bits."""


def number_of(batch: Mapping[str, Any], *, length: int = 0) -> torch.Tensor:
    """Return int64 (2,): a number made of the integers of a batch, which other values or places change, and a length.

    Args:
        batch: with one tensor at least, whose device is the number's.
        length: the tokens of a whole row, where those of the part are this rank's, else 0.
    """
    tensors = {name: x if isinstance(x, torch.Tensor) else _flat(x) for name, x in batch.items()}
    device = next(x.device for x in batch.values() if isinstance(x, torch.Tensor))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name in sorted(tensors):
        x = tensors[name].to(device)
        if x.is_floating_point():  # of images and sound, which the tokens go with
            continue
        sizes = torch.tensor(x.shape, device=device)
        values = torch.cat((torch.tensor([*name.encode()], device=device), sizes, x.flatten().long()))
        mixed = (values + torch.arange(1, len(values) + 1, device=device) * _ODD[0]) * _ODD[1]
        total = total + ((mixed ^ (mixed >> 29)) * _ODD[0]).sum()
    return torch.stack((total, total.new_full((), length)))


def is_cut(number: torch.Tensor | None) -> bool:
    """Return whether the tokens of a part are this rank's; a part whose number is not known counts as whole."""
    return number is not None and bool(number[1])


def layout_of_rows(number: torch.Tensor | None, tokens: int, ranks: int, *, whole: bool) -> Layout:
    """Return the tokens of every rank, where this one has so many of a row: its part, or the whole row.

    Without a number of the batch the ranks hold equal parts: no rank can tell the length of a row from its own part.

    Raises:
        UnsupportedError: a rank holds none.
    """
    length = int(number[1]) if number is not None and is_cut(number) else tokens if whole else tokens * ranks
    if length < ranks:
        raise UnsupportedError(
            f"rows of {length or 'no'} tokens on {ranks} ranks",
            "a rank would have none, of which layers of transformers make no heads",
            "at least as many tokens as ranks",
        )
    return contiguous(length, ranks)


def _flat(numbers: Any) -> torch.Tensor:
    """Return integers in lists of any depth as one tensor."""
    if not isinstance(numbers, list | tuple):
        return torch.as_tensor(numbers).flatten()
    return torch.cat([torch.zeros(0, dtype=torch.int64), *map(_flat, numbers)])


def check_same(number: torch.Tensor | None, group: str, device: torch.device, kind: torch.Tensor | int = 0) -> int:
    """Check that the ranks of a group hold parts of the same batch; collective, with one small message.

    Args:
        number: of this rank's batch, None where it is not known.

    Returns:
        The largest `kind` of a rank.

    Raises:
        UnsupportedError: they had other batches; all raise it.
        DisagreementError: another rank refuses its call; AbsentError: one does not come.
    """
    facts = torch.zeros(2, dtype=torch.int64, device=device)
    facts[0] = kind
    if number is not None:
        facts[1] = number[0].to(device)
    over, mine = channel_of(group, verify=True) if group else None, facts.cpu()  # where a wait can be given up
    rows = [mine] if over is None else over.gather(mine, _COMPARES)
    kinds, numbers = torch.stack(rows).T.tolist()
    worst = max(kinds)
    if worst == REFUSED:
        if kind == REFUSED:
            return REFUSED
        who = listed([rank for rank, theirs in enumerate(kinds) if theirs == REFUSED])
        raise DisagreementError(f"rank {who} of the group refuses its part of this batch; the error there says why")
    if len({*numbers}) > 1:
        raise UnsupportedError(
            "batches that differ between the ranks of a sequence",
            "each rank takes its part of one batch, and finds another than the others'",
            "the same samples on every rank of a group: a DistributedSampler with num_replicas and rank of the groups, "
            "not of all ranks; loaders prepared after distribute_accelerator; the same data set, collator and seed; "
            "shard_batch",
        )
    return int(worst)
