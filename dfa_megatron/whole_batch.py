"""Read which tokens of a whole batch attend to which, and compare the batch between the ranks that are to share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.agreement.calls import Kind
from dfa_megatron.runtime.agreement.store import listed
from dfa_megatron.runtime.comm.groups import Group, channel_of

TREE, MASK = "prompt_tree", "mask"
"""The entries of a batch: a `Tree` or its lengths and parents; a `Mask` of a whole row."""

_COMPARES = Kind.of("compares its batch with those of the other ranks")

_ODD = (-7046029254386353131, 0x2545F4914F6CDD1D)
"""Factors that spread numbers over 64 bits."""


def pairs_of(batch: Mapping[str, Any], *others: str) -> Tree | Mask | None:
    """Return the tree or the mask that a batch tells, None if it tells neither; refuse it beside `others`."""
    found = [name for name in (TREE, MASK, *others) if batch.get(name) is not None]
    if not found or found[0] in others:
        return None
    name, *beside = found
    if beside:
        raise UnsupportedError(
            f"a {name} beside {', '.join(beside)}",
            "each says by itself which tokens attend to which",
            "one of them: documents as roots of the prompt_tree, or one dfa_megatron.masks.union of all as the mask",
        )
    given, wrong = batch[name], ""
    try:
        pairs = Tree.of(given) if name == TREE else given
        wrong = "" if isinstance(pairs, Tree if name == TREE else Mask) else f"it is of type {type(pairs).__name__}"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise UnsupportedError(
            f"a {name} that does not fit",
            wrong,
            "(lengths, parents) of a whole row, as dfa_megatron.masks.prompt_tree takes them, or a mask of "
            "dfa_megatron.masks",
        )
    return pairs


def check_length(pairs: Tree | Mask, tokens: int) -> None:
    """Refuse a tree or a mask of other than the `tokens` of a whole row."""
    if pairs.length != tokens:
        raise UnsupportedError(
            f"a prompt_tree or mask of {pairs.length} tokens with rows of {tokens}",
            "it says of every token of a row which others it sees",
            "one of the whole row; padding may be a root segment of its own",
        )


def check_same(group: Group, batch: Mapping[str, Any] | None, instead: str, *, asks: bool = False) -> bool:
    """Check that the ranks of a group have the same batch; collective, with one small message.

    They compare a number of its integers, and of the bits of what is no integer.

    Args:
        batch: entries, of which the first has (rows, tokens, ...). None where this rank refuses its call, which it
            tells the others.
        instead: what works.
        asks: this rank asks for something more.

    Returns:
        Whether a rank asks.

    Raises:
        UnsupportedError: they have other batches; all raise it.
        DisagreementError: another rank refuses its call; AbsentError: one does not come.
    """
    over = channel_of(group, verify=True) if group else None  # where a wait can be given up
    if over is None:
        return asks
    facts = (0, 0, 0)  # rows, tokens of a row, number
    if batch is not None:
        tokens = next(iter(batch.values()))
        facts = (*tokens.shape[:2], int(_number_of(batch, tokens.device)))
    with over.running(_COMPARES, torch.device("cpu")):
        every = torch.stack(over.gather(torch.tensor((*facts, asks), device="cpu"))).tolist()
    asked = [each.pop() for each in every]
    if batch is None or all(each == every[0] for each in every):
        return any(asked)
    if refusing := [rank for rank, (rows, *_) in enumerate(every) if not rows]:
        why = f"rank {listed(refusing)} of the group refuses its part of this batch; the error there says why"
        raise DisagreementError(why)
    table = "".join(
        f"\n    rank {rank}: {rows} x {length} tokens, number {number & 0xFFFFFFFF:08x}"
        for rank, (rows, length, number) in enumerate(every)
    )
    raise UnsupportedError(
        "batches that differ between the ranks of a sequence",
        "each rank must give the whole batch, of which it keeps its part",
        f"the same samples on every rank of a group, not cut: {instead}. The ranks have:{table}",
    )


def _number_of(batch: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return an int64 that other values of a batch, or other places of them, change."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for name in sorted(batch):
        x = _flat(batch[name]).to(device)
        sizes = torch.tensor(x.shape, dtype=torch.int64, device=device)
        x = _bits(x) if x.is_floating_point() else x
        values = torch.cat((torch.tensor([*name.encode()], device=device), sizes, x.flatten().long()))
        mixed = (values + torch.arange(1, len(values) + 1, device=device) * _ODD[0]) * _ODD[1]
        total = total + ((mixed ^ (mixed >> 29)) * _ODD[0]).sum()
    return total


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers as integers, or their sum for each token (batch, seq)."""
    whole = x.detach().contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])
    return whole.sum(-1, dtype=torch.int64) if x.dim() > 2 else whole


def _flat(value: Any) -> torch.Tensor:
    """Return a tensor as it is, integers in lists of any depth as one tensor, and a number of a tree or a mask."""
    if isinstance(value, Tree | Mask):
        return torch.tensor([crc32(repr(value).encode())])
    if not isinstance(value, list | tuple):
        return torch.as_tensor(value)
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(_flat(each).flatten() for each in value)])
