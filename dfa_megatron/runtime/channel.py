"""A channel: what one process group needs to run distributed attention, made once per group."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime.agree import exchange
from dfa_megatron.runtime.copy_engine import host, open_transport
from dfa_megatron.runtime.groups import ByName, end_gently, resolve, timeout_of
from dfa_megatron.runtime.transport import GlooTransport, NcclTransport, Transport

logger = logging.getLogger(__name__)

_PATIENCE = 300.0
"""Seconds for the ranks of a group to come together for the first time."""


class Channel:
    """Own communicators of a group: messages never queue behind another library's collectives.

    rank, size: of this process in the group, and of the group.
    hosts: how many machines they are on.
    timeout: of its communicators, as the group's own; None is the backend's default.
    """

    def __init__(self, ranks: list[int], timeout: timedelta | None = None) -> None:
        if ranks != sorted(ranks):
            raise UnsupportedError(
                f"a process group of global ranks {ranks}",
                "its communicators would number them in ascending order",
                "a group whose ranks ascend, as torch.distributed makes them by default",
            )
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._ranks, self._timeout = ranks, timeout
        end_gently()
        self._side = ByName(dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True))
        self.hosts = len({facts["host"] for facts in exchange({"host": host()}, self.side, _PATIENCE)})
        self._transports: dict[tuple[str, str], Transport] = {}
        self._collectives: dict[str, ByName] = {}
        self._parts: dict[tuple[int, ...], Channel] = {}

    @property
    def side(self) -> dist.ProcessGroup:
        """A gloo group for agreement, which the host may wait on without touching the device."""
        return self._side.group

    def transport(self, device: torch.device, kind: str = "auto", timeout: float = 120.0) -> Transport:
        """What moves messages of tensors on that kind of device: "p2p", "copy_engine", or "auto" for the better one.

        The first call is collective. It comes after the ranks have agreed: a rank whose tensors are elsewhere is
        told so instead of being waited for. `timeout` is in seconds.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and cannot serve these ranks.
        """
        known = self._transports.get((device.type, kind))
        if known is None:
            known = self._transports[device.type, kind] = self._open(device, kind, timeout)
        return known

    def _open(self, device: torch.device, kind: str, timeout: float) -> Transport:
        if kind == "auto":
            if device.type == "cpu":
                return self.transport(device, "p2p", timeout)
            try:
                _refuse_one_queue()
                return self.transport(device, "copy_engine", timeout)
            except UnsupportedError as error:
                logger.info("messages go point to point: the copy engines do not serve: %s", error.why)
                return self.transport(device, "p2p", timeout)
        if kind == "copy_engine":
            found = open_transport(self.side, device, timeout)
            if isinstance(found, str):
                raise UnsupportedError("transport='copy_engine'", found, "transport='p2p'")
            return found
        group = _communicator(self._ranks, device, self._timeout)
        return GlooTransport(group) if device.type == "cpu" else NcclTransport(group, device)

    def reserve(self, device: torch.device, kind: str, nbytes: int, timeout: float) -> None:
        """Make room for messages in the memory of that kind of transport; collective, as `transport` is.

        Where a GPU has no memory for them, "auto" is point to point from then on.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and a GPU has no memory for it; on every rank.
        """
        try:
            self.transport(device, kind, timeout).reserve(nbytes)
        except UnsupportedError as error:
            if kind != "auto":
                raise
            logger.warning("messages go point to point from now on: %s", error.why)
            self._transports[device.type, kind] = self.transport(device, "p2p", timeout)

    def has_symmetric_memory(self, kind: str) -> bool:
        """That kind of transport has reserved memory that PyTorch's allocator knows nothing of."""
        known = self._transports.get(("cuda", kind))
        return known is not None and known.generation > 0

    def collectives(self, device: torch.device) -> dist.ProcessGroup:
        """A process group for collectives of tensors on that kind of device; the first call is itself collective."""
        if device.type not in self._collectives:
            self._collectives[device.type] = ByName(_communicator(self._ranks, device, self._timeout))
        return self._collectives[device.type].group

    def part(self, ranks: Sequence[int]) -> Channel:
        """The channel of some of this channel's ranks, with this one among them; the first call is collective.

        Every rank of the whole must make the channels of its parts in the same order, after all have agreed.
        """
        key = tuple(ranks)
        if key not in self._parts:
            self._parts[key] = Channel([self._ranks[rank] for rank in key], self._timeout)
        return self._parts[key]


_channels: dict[str, tuple[weakref.ref[dist.ProcessGroup], Channel]] = {}


def channel(name: str, device: torch.device | None = None) -> Channel:
    """The channel of a named group; the first call for a group must be made by all of its ranks.

    device: of the tensors to come; the current GPU if None.

    The communicators are made from the group's own ranks only, so other ranks need not take part, and every rank makes
    them in the order in which it first uses its groups.
    """
    group = resolve(name)
    known = _channels.get(name)
    if known is None or known[0]() is not group:
        _refuse_unequal_counts(group, device)
        made = Channel(dist.get_process_group_ranks(group), timeout_of(group))
        known = _channels[name] = (weakref.ref(group), made)
    return known[1]


def _communicator(ranks: list[int], device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup:
    group: dist.ProcessGroup
    if device.type == "cpu":
        group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # PyTorch warns where the two differ
    group = dist.new_group(ranks, timeout, backend="nccl", pg_options=options, use_local_synchronization=True)
    # The communicator is made now, by all ranks together: the first batch of a plan need not include every rank.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    logger.info("made a NCCL communicator of %d ranks for distributed attention", len(ranks))
    return group


def _refuse_one_queue() -> None:
    """A copy-engine stream waits for its peers in the queue that it shares with other streams.

    Raises:
        UnsupportedError: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron wants on Hopper, leaves one queue for all.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UnsupportedError(
            "transport='copy_engine' by itself",
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels would queue up behind its waits, which has not been measured",
            "transport='copy_engine' by name",
        )


def _refuse_unequal_counts(group: dist.ProcessGroup, device: torch.device | None) -> None:
    """PyTorch names a group that only its own ranks make by how many groups the process has: unequal, they would hang.

    Raises:
        DisagreementError: the processes of the group have made unequal numbers of groups.
    """
    count = len(getattr(distributed_c10d._world, "pg_names", ()))
    if torch.device("cpu") in group._device_types:
        device = torch.device("cpu")
    elif device is None or device.type == "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([count], device=device), group=group)
    found = [int(x) for x in counts]
    if len(set(found)) > 1:
        raise DisagreementError(
            f"the processes of the group are in {found} process groups by rank, and PyTorch lets some of them make one "
            "more only where these are equal. Run the first attention of a group before groups that only some of its "
            "ranks belong to are made, or let every rank belong to as many"
        )
