"""Process groups that tests ask for."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def alone() -> dist.ProcessGroup:
    """A group of this rank only; the others need not know of it."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def rank_0_keeps_the_store(rank: int, ranks: int, folder: Path, seconds: float = 30.0) -> None:
    """Make the default group anew, as without torchrun; rank 0 tells its port through a folder that all ranks see."""
    dist.barrier()  # whoever destroys a group early can keep others from making theirs
    dist.destroy_process_group()
    note, timeout = folder / "port", timedelta(seconds=seconds)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, True, timeout=timeout, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(note)
    while not note.exists():
        time.sleep(0.01)
    if rank:
        store = dist.TCPStore("127.0.0.1", int(note.read_text()), ranks, False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)


def free_port() -> int:
    """Return a port of this host for `as_torchrun_starts`."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def as_torchrun_starts(rank: int, world_size: int, port: int) -> None:
    """Leave this rank of `run_ranks` without a group, and in the environment of a rank of torchrun on one host."""
    dist.barrier()
    dist.destroy_process_group()
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
