"""This process's machine, packages and the environment variables that the runtime reads; it sets one, for one call."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import select
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

TESTED: Mapping[str, tuple[str, str]] = {
    "torch": ("2.6.0", "2.15.0"),
    "triton": ("3.2.0", "3.9.0"),
    "flash-attn-4": ("4.0.0b36", "4.0.0b36"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("5.0.0", "5.24.0"),
    "accelerate": ("1.13.0", "1.15.0"),
    "peft": ("0.21.2", "0.21.2"),
    "trl": ("1.16.0", "1.16.0"),
    "deepspeed": ("0.19.6", "0.19.8"),
}
"""The oldest and the newest release of each package that tests pass with."""

_IMPORTED_AS = {"flash-attn-4": "flash_attn.cute", "megatron-core": "megatron.core"}
_read: set[str] = set()

_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_INSIDE, _NETWORK = ("p2p", "memory", "network"), ("adapters", "sockets")


class Links(NamedTuple):
    """How NCCL reaches other ranks, the fastest named first.

    inside: a machine: "p2p", "memory" of the host, or its "network". network: "adapters" or TCP "sockets".
    """

    inside: str = "p2p"
    network: str = "adapters"


def links(adapters: Path = Path("/sys/class/infiniband")) -> Links:
    """Return how this process's NCCL will reach others, as its environment and the machine's adapters say."""
    asked, plugin = os.environ.get("NCCL_NET", ""), os.environ.get("NCCL_NET_PLUGIN", "none")
    has_adapters = os.environ.get("NCCL_IB_DISABLE", "0") != "1" and adapters.is_dir() and any(adapters.iterdir())
    sockets = asked.lower() == "socket" or (not asked and plugin == "none" and not has_adapters)
    without_memory = forbids_p2p() and os.environ.get("NCCL_SHM_DISABLE") == "1"
    return Links(_INSIDE[forbids_p2p() + without_memory], _NETWORK[sockets])


def slowest(ranks: Sequence[Mapping[str, str]]) -> Links:
    """Return the slowest links of all ranks' `links`, so that every rank plans for the same."""
    return Links(
        max((rank["inside"] for rank in ranks), key=_INSIDE.index),
        max((rank["network"] for rank in ranks), key=_NETWORK.index),
    )


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
    """Have PyTorch's symmetric memory bind no multicast address inside; a value that the user has set stays.

    PyTorch offers no argument for it. Binding would touch the memory of all GPUs of a host.
    """
    before = os.environ.get(_MULTICAST)
    os.environ.setdefault(_MULTICAST, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MULTICAST]


def host() -> str:
    """Return text that identifies this machine and its current boot."""
    try:
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()}"
    except OSError:
        return socket.gethostname()


def process() -> dict[str, str]:
    """Return this process's pid and the namespace in which the pid is valid (a machine or a container)."""
    try:
        return {"pid": str(os.getpid()), "space": f"{host()} {os.readlink('/proc/self/ns/pid')}"}
    except OSError:
        return {"pid": "0", "space": ""}


def has_ended(pid: int) -> bool:
    """Return whether a process of this namespace has ended; one that its parent has not yet waited for counts."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or a sandbox
        return False
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(handle)


def installed(package: str) -> str | None:
    """Return the version of an installed package, None without one."""
    if package == "megatron-core" and (core := sys.modules.get("megatron.core")):
        return str(core.__version__)  # a clone on PYTHONPATH tells pip nothing
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def order_of(version: str) -> tuple[list[int], str, int]:
    """Return what sorts versions: builds are alike, and "a", "b", "dev" and "rc" stand before "release"."""
    release, stage, number = re.findall(r"^([\d.]*)(a|b|dev|rc)?(\d*)", version)[0]
    return [int(part) for part in release.split(".") if part], stage or "release", int(number or 0)


def span(package: str) -> str:
    """Return the oldest and the newest tested release of a package, in words."""
    return " to ".join(dict.fromkeys(TESTED[package]))


def warn_of_untested() -> None:
    """Log once a process each imported package that is newer, or older, than every release tested."""
    for package, (oldest, newest) in TESTED.items():
        if package not in _read and _IMPORTED_AS.get(package, package) in sys.modules:
            _read.add(package)  # to read a version takes a millisecond
            version = installed(package)
            if version and not order_of(oldest) <= order_of(version) <= order_of(newest):
                logger.warning("%s %s is not what was tested: %s", package, version, span(package))
