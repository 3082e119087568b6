"""What a figure depends on beside the code, and ranks that share GPUs."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from dfa_megatron.doctor.machine import devices, versions


def machine() -> dict[str, Any]:
    """Return the surroundings that a figure depends on: device, versions, NCCL's and CUDA's environment."""
    told = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_DEVICE_MAX"))}
    gpus = devices()
    where = {"device": gpus[0]["name"], "memory_gib": gpus[0]["gib"]} if gpus else {"device": platform.machine()}
    return where | {"versions": versions(), "environment": told}


def share_gpus(rank: int, ranks: int) -> None:
    """Choose the GPU of a rank, one of so many on this machine, before NCCL starts.

    Ranks share GPUs where these are fewer. NCCL refuses that on one host, so each rank is then told that it is a host.
    """
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % gpus)
