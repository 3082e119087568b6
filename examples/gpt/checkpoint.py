"""Save and load training as a Megatron checkpoint (torch_dist): model, optimizer, learning rate, random numbers."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from gpt import saved
from gpt.errors import UserError
from gpt.index import refuse_code
from gpt.model import Trainer

_FAILURES = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, CheckpointingException)


class _Writer(FileSystemWriter):
    """Raise the operating system's error, such as "no space left"; PyTorch's archive raises one that hides it."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors.

        Raises:
            OSError: the first error of the operating system.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error


class _InThisProcess(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by PyTorch's writer.

    Megatron's own writer starts processes that outlive a killed rank, and waits forever for a killed process.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write this rank's part; an error of one rank is raised on all."""
        by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save_parts(
            torch_dist.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=_Writer(checkpoint_dir),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(trainer: Trainer, root: str, step: int, facts: saved.Facts) -> None:
    """Write the checkpoint of a step; every rank calls this.

    Raises:
        UserError: it could not be written; the checkpoint before it is still there.
    """
    first = dist.get_rank() == 0
    try:
        if first:
            saved.begin(Path(root), step)
        dist.barrier()
        folder = str(saved.unfinished(Path(root), step))
        dist_checkpointing.save(_state(trainer, loading=False), folder, _InThisProcess("torch_dist", 1))
        if first:
            saved.finish(Path(root), step, facts)
        dist.barrier()
    except (*_FAILURES, CheckpointException) as error:
        raise UserError(f"cannot save step {step} into {root}: {_reason(error)}") from error


def load(trainer: Trainer, found: saved.Saved) -> None:
    """Read a checkpoint into model, optimizer, schedule and random number generators; every rank calls this.

    Raises:
        UserError: the checkpoint is damaged, or holds other tensors than this run needs.
    """
    # Run no code of a checkpoint: beside its index, PyTorch then loads tensors and plain values only.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        refuse_code(found.folder / ".metadata")
        wanted = _state(trainer, loading=True)
        with warnings.catch_warnings():  # PyTorch warns about Megatron's way to call it
            warnings.simplefilter("ignore", FutureWarning)
            state, missing, unexpected = dist_checkpointing.load(wanted, str(found.folder), strict="return_all")
    except (*_FAILURES, CheckpointException) as error:
        raise UserError(f"cannot load {found.folder}: {_reason(error)}") from error
    if missing or unexpected:
        raise UserError(f"{found.folder} holds other tensors: {', '.join(sorted({*missing, *unexpected})[:3])}")
    trainer.model.module.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.num_steps = 0  # loading adds the steps that were saved
    trainer.scheduler.load_state_dict(state["opt_param_scheduler"])
    _set_random(state["random"])


def _state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    """Return the tensors to save, or to load into, by Megatron's names."""
    model = trainer.model.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=loading),
        "opt_param_scheduler": trainer.scheduler.state_dict(),
        "random": {name: _one_of_each_model_rank(name, state) for name, state in _random().items()},
    }


def _random() -> dict[str, torch.Tensor]:
    """Return copies of the generators' states: PyTorch's for CPU and GPU, and Megatron's by name.

    Loading writes into the copies. Only `_set_random` changes the generators.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()} | {
        f"megatron.{name}": state.clone() for name, state in tracker.items()
    }


def _set_random(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["cuda"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: states[f"megatron.{name}"] for name in tracker.get_states()})


def _one_of_each_model_rank(name: str, state: torch.Tensor) -> Any:
    """Shard a generator's state: ranks with the same part of the model draw alike, and one of them saves it."""
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    size = parallel_state.get_tensor_model_parallel_world_size()
    parts = size * parallel_state.get_pipeline_model_parallel_world_size()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    place = (0, pipeline * size + tensor, parts)
    return ShardedTensor.from_rank_offsets(f"random.{name}", state, place, replica_id=replica)


def _reason(error: BaseException) -> str:
    """Return one line: the message of the first rank that failed."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
