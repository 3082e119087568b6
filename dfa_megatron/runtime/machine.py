"""The profile of the machine that a group runs on, from what every rank of it sees alike."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from dfa_megatron.plan.cost.hardware import (
    CPU_LOOPBACK,
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    Hardware,
    computing_with,
)
from dfa_megatron.plan.cost.profile import profile_named
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.environment import forbids_p2p

_named = lru_cache(maxsize=8)(profile_named)


def profile_of(hardware: str, cuda: bool, channel: Channel | None, kernel: str | None) -> Hardware:
    """What `schedule="auto"` simulates with: the CPU's loopback, one host's NVLink or what is left of it, or several.

    NCCL_P2P_DISABLE=1 is how a host whose GPUs do not reach each other is run.

    Args:
        hardware: the option of that name; a profile that it names goes before what the ranks see.
        cuda: the tensors are on GPUs.
        channel: of the ranks, None for one rank.
        kernel: what computes the blocks, as far as it is known before there is a plan.

    Raises:
        UnsupportedError: there is no such profile or file, or the file is none.
    """
    if hardware != "auto":
        return computing_with(kernel, _named(hardware))
    if not cuda:
        return CPU_LOOPBACK
    if channel is not None and channel.hosts > 1:
        found = dataclasses.replace(H200_NIC_400G, ranks_per_node=max(1, channel.size // channel.hosts))
    else:
        found = H200_SLOW_LINK if forbids_p2p() else H200_NVLINK
    return computing_with(kernel, found)
