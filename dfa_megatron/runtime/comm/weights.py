"""Compare the weights of a model between the ranks of a group, by a few rows of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch

from dfa_megatron.errors import DisagreementError
from dfa_megatron.runtime.agreement.calls import Facts
from dfa_megatron.runtime.agreement.store import listed
from dfa_megatron.runtime.comm.groups import Group, channel_of

_SHARDS = ("ds_id", "_fsdp_flattened", "_is_flat_param")
"""The attributes by which ZeRO 3 and FSDP1 mark parameters of which a rank holds a part."""


def digests(model: torch.nn.Module) -> Facts:
    """Return a digest of the first, the middle and the last rows of each parameter, by name.

    Left out are shards, quantized weights, those whose values are elsewhere, and experts that ranks hold by themselves.
    """
    found = {}
    x: Any
    for name, x in _compared(model):
        for dim, size in enumerate(x.shape[:-1]):
            rows = torch.tensor(sorted({0, size // 2, size - 1}), device=x.device)
            x = x.index_select(dim, rows)
        copied = x.flatten().to("cpu", copy=True)  # numpy would keep FSDP from resizing the parameter's storage
        found[name] = f"{crc32(copied.view(torch.uint8).numpy()):x}"
    return found


def _compared(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        x = parameter.detach()
        plain = type(parameter.data) is torch.Tensor and x.is_floating_point() and x.dtype.itemsize > 1
        whole = getattr(parameter, "allreduce", True) and not any(hasattr(parameter, mark) for mark in _SHARDS)
        if plain and whole and x.numel() and x.device.type != "meta" and parameter.untyped_storage().nbytes():
            yield name, x


def changes(model: torch.nn.Module) -> int | None:
    """Return a number that rises with each change of the weights that `digests` reads, None where it reads none."""
    versions = [x._version for _, x in _compared(model)]
    return sum(versions) if versions else None


FIRST = "one seed before the model is made, one checkpoint, or a broadcast, as DDP does"
STEPPED = "gradients that are averaged over the ranks before the optimizer steps, as DDP, FSDP and DeepSpeed do"


def check_weights(model: torch.nn.Module, group: Group, instead: str = FIRST) -> None:
    """Compare weights, or raise a DisagreementError on all ranks; collective. instead: what would make them equal."""
    if (over := channel_of(group, verify=True)) is None:
        return
    with over.calls.preparing():
        mine = digests(model)
        totals = over.exchange({"weights": str(crc32(repr(sorted(mine.items())).encode()))})
        if all(total == totals[0] for total in totals):
            return
        everyone = over.exchange(mine)
    name = next(name for each in everyone for name in each if len({theirs.get(name) for theirs in everyone}) > 1)
    ranks = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != everyone[0].get(name)]
    raise DisagreementError(
        f"the ranks of a group hold other weights: {name} is the first that differs, between rank 0 and rank "
        f"{listed(ranks)}. What works: {instead}"
    )
