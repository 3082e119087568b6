"""The environment variables that the runtime reads. It sets none, except for one call (`without_multicast`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def has_one_queue() -> bool:
    """Return whether CUDA_DEVICE_MAX_CONNECTIONS=1 leaves one hardware queue for all streams, as Megatron asks."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def forbids_p2p() -> bool:
    """Return whether NCCL_P2P_DISABLE=1 forbids GPUs to reach each other's memory."""
    return os.environ.get("NCCL_P2P_DISABLE") == "1"


def launcher_keeps_store() -> bool:
    """Return whether torchrun's agent keeps the store of the default group; else global rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def without_multicast() -> Iterator[None]:
    """Have PyTorch's symmetric memory bind no multicast address inside; the environment is restored afterwards.

    PyTorch offers an environment variable and no argument for it. Binding would touch the memory of all GPUs of a host,
    and nothing here uses multicast. A value that the user has set stays.
    """
    if _MULTICAST in os.environ:
        yield
        return
    os.environ[_MULTICAST] = "1"
    try:
        yield
    finally:
        del os.environ[_MULTICAST]
