"""Identity of machines and processes: which ranks share a machine, and which processes have ended."""

from __future__ import annotations

import os
import socket


def host() -> str:
    """Return text that identifies this machine and its current boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def process() -> dict[str, str]:
    """Return this process's pid and the namespace in which the pid is valid (a machine or a container)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return {"pid": "0", "space": ""}
    return {"pid": str(os.getpid()), "space": f"{host()} {space}"}


def has_ended(pid: int) -> bool:
    """Return whether a process of this namespace has ended; a zombie counts as ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False
