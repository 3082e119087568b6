"""A channel: what one process group needs to run distributed attention, made once per group and kind of device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dfa_megatron.runtime.transport import GlooTransport, NcclTransport, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Channel:
    """Own communicators of a group: messages never queue behind another library's collectives.

    side: a gloo group for agreement, which the host may wait on without touching the device.
    """

    rank: int
    size: int
    side: dist.ProcessGroup
    transport: Transport


_channels: dict[tuple[str, str], tuple[dist.ProcessGroup, Channel]] = {}


def group_name(group: dist.ProcessGroup | str | None) -> str:
    """The name that the operator takes for a group; "" is a single process."""
    if isinstance(group, str):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def group_size(name: str) -> int:
    """How many ranks a named group has."""
    return _resolve(name).size() if name else 1


def _resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name; operators can take names, but no groups."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    return group


def channel(name: str, device: torch.device) -> Channel:
    """The channel of a named group; the first call for a group must be made by all of its ranks.

    The communicators are made from the group's own ranks only, so other ranks need not take part, and every rank makes
    them in the order in which it first uses its groups.
    """
    group = _resolve(name)
    known = _channels.get((name, device.type))
    if known is not None and known[0] is group:
        return known[1]
    ranks = dist.get_process_group_ranks(group)
    side = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    transport = _transport(ranks, device)
    made = Channel(group.rank(), group.size(), side, transport)
    _channels[name, device.type] = (group, made)
    return made


def _transport(ranks: list[int], device: torch.device) -> Transport:
    if device.type == "cpu":
        return GlooTransport(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = dist.new_group(ranks, backend="nccl", pg_options=options, use_local_synchronization=True)
    # The communicator is made now, by all ranks together: the first batch of a plan need not include every rank.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    logger.info("made a NCCL communicator of %d ranks for distributed attention", len(ranks))
    return NcclTransport(group, device)
