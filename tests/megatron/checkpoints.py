"""torch_dist checkpoints of a model in one chunk, and of its optimizer, as Megatron's scripts write and read them."""

from __future__ import annotations

import multiprocessing
import queue
from pathlib import Path
from typing import Any

import torch.distributed as dist


def state_of(model: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
    """What is handed to dist_checkpointing; without the optimizer where there is none."""
    layers = model.sharded_state_dict()
    if optimizer is None:
        return {"model": layers}
    return {"model": layers, "optimizer": optimizer.sharded_state_dict(layers, is_loading=loading)}


def save(folder: str, model: Any, optimizer: Any = None) -> None:
    """Write a checkpoint; every rank calls this."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # It asks psutil, which is among nobody's requirements, for a line of its log.
    filesystem_async._process_memory = lambda: 0
    # It hands results to itself through a process that it would spawn, which imports all for seconds.
    filesystem_async._results_queue = queue.Queue()
    # Megatron writes through processes of its own, which a worker of the tests, being a daemon, may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    dist_checkpointing.save(state_of(model, optimizer, loading=False), folder)


def load(folder: str, model: Any, optimizer: Any = None) -> None:
    """Read one; nothing in it may be left over or missing."""
    from megatron.core import dist_checkpointing

    wanted = state_of(model, optimizer, loading=True)
    state, missing, unexpected = dist_checkpointing.load(wanted, folder, strict="return_all")
    assert (missing, unexpected) == (set(), set())
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
