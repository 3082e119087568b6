"""What tells machines and processes apart, so that ranks know which others they share a machine with."""

from __future__ import annotations

import os
import socket


def host() -> str:
    """What tells this machine, and this boot of it, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def process() -> dict[str, str]:
    """This process: its number, and the space in which that number means something (a machine, or a container)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return {"pid": "0", "space": ""}
    return {"pid": str(os.getpid()), "space": f"{host()} {space}"}


def has_ended(pid: int) -> bool:
    """Whether a process of this space has ended; also one whose parent has not asked for its exit status yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False
