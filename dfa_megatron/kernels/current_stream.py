"""Where kernels run: the current stream, without the lookups of `torch.cuda.current_stream`, or an interpreter.

These take the host several microseconds a call, and a short attention asks ten times.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream, 0 on a CPU.

    Another stream may not yet read what this one has copied to a device.
    """
    if device.type != "cuda":
        return 0
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU."""
    return _known(stream_of(device), device)


@lru_cache(maxsize=64)
def _known(_handle: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1: Triton's kernels run in its interpreter, on CPU tensors too.

    Triton reads the variable when a kernel is defined.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
