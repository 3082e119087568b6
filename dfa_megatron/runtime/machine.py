"""The profile of the machine that a group runs on, from what every rank of it sees alike."""

from __future__ import annotations

import dataclasses
import os

from dfa_megatron.plan.hardware import (
    CPU_LOOPBACK,
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    Hardware,
    computing_with,
)
from dfa_megatron.runtime.channel import Channel


def profile_of(cuda: bool, channel: Channel | None, kernel: str | None) -> Hardware:
    """What `schedule="auto"` simulates with: the CPU's loopback, one host's NVLink or what is left of it, or several.

    NCCL_P2P_DISABLE=1 is how a host whose GPUs do not reach each other is run.

    Args:
        cuda: the tensors are on GPUs.
        channel: of the ranks, None for one rank.
        kernel: what computes the blocks, as far as it is known before there is a plan.
    """
    if not cuda:
        return CPU_LOOPBACK
    if channel is not None and channel.hosts > 1:
        found = dataclasses.replace(H200_NIC_400G, ranks_per_node=max(1, channel.size // channel.hosts))
    else:
        found = H200_SLOW_LINK if os.environ.get("NCCL_P2P_DISABLE") == "1" else H200_NVLINK
    return computing_with(kernel, found)
