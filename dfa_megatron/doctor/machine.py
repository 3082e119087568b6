"""Describe the machine: versions of packages and libraries, GPUs, and direct access between their memories."""

from __future__ import annotations

import platform
from typing import Any

import torch

from dfa_megatron import __version__
from dfa_megatron.runtime.environment import TESTED, installed

PACKAGES = (
    *TESTED, "numpy", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", "quack-kernels", "flash_attn_3",
    "flash-attn", "ring-flash-attn", "yunchang", "transformer-engine",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32", "float64")


def versions() -> dict[str, str]:
    """Return the versions of this package, Python, PyTorch's libraries and the installed optional packages."""
    found = {"dfa-megatron": __version__, "python": platform.python_version()}
    found |= {package: version for package in PACKAGES if (version := installed(package))}
    found["torch"] = torch.__version__  # with its build
    if torch.version.cuda and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def devices() -> list[dict[str, Any]]:
    """Return the GPUs that PyTorch sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def p2p_access() -> list[list[bool]]:
    """Return whether GPU i reaches the memory of GPU j; true for itself."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
