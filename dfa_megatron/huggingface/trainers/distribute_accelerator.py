"""Let a loop around accelerate train and evaluate with sequences that ranks share, without DeepSpeed.

accelerate's loaders give the ranks of a group the same batches, as for its own context parallelism. That itself is left
out: it cuts tensors in place, drops masks, and computes causal SDPA only.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.distribute import distribute_attention, transformers_model
from dfa_megatron.huggingface.refusals import ACCELERATOR
from dfa_megatron.huggingface.trainers.shared_batches import take_whole_batches


def distribute_accelerator(
    accelerator: Any, model: torch.nn.Module, *, size: int | None = None, config: DistAttentionConfig | None = None
) -> int:
    """Share each sequence of an accelerate loop among consecutive ranks; a collective call before `prepare`.

    The ranks of a group then get the same batches from loaders that are prepared later. The model takes such a batch
    whole and cuts it. In training its loss is that of `shard_batch`: the mean over ranks is the mean of the groups'
    losses. `num_items_in_batch`, if given, is that of a loop without sharing. In evaluation every rank gets the loss of
    the whole batch and the logits of all tokens, and `gather_for_metrics` takes the values of one rank of each group.

    Args:
        accelerator: an `accelerate.Accelerator`, with DDP or FSDP2.
        model: a transformers model, or a module that holds one (PEFT).
        size: the ranks that share a sequence; None is `ParallelismConfig.cp_size` where that is more than 1, else all.
        config: schedule, kernel, checkpoint and the like.

    Returns:
        The ranks that share a sequence.

    Raises:
        UnsupportedError: the accelerator or the model needs something unsupported; the message names it.
    """
    world = accelerator.num_processes
    parallel = accelerator.parallelism_config
    theirs = 1 if parallel is None else parallel.cp_size
    size = (theirs if theirs > 1 else world) if size is None else size
    known: _Models | None = getattr(accelerator, _MODELS, None)
    others = [name for name in ("sp_size", "tp_size") if getattr(parallel, name, 1) > 1]
    ACCELERATOR.check(
        uneven_size=str(size) if size < 1 or world % size else None,
        ranks=world,
        two_sizes=size if theirs not in (1, size) else None,
        cp_size=theirs,
        other_size=size if known is not None and size != known.size else None,
        known_size=0 if known is None else known.size,
        other_parallelism=f"{others[0]}={getattr(parallel, others[0])}" if others else None,
        deepspeed=accelerator.distributed_type == "DEEPSPEED",
        dispatched=accelerator.dispatch_batches,
    )
    if world == 1:
        distribute_attention(model, config=config)
        return 1
    mesh = accelerator.torch_device_mesh if known is None else known.mesh
    if theirs == 1 and known is None:
        mesh = init_device_mesh(accelerator.device.type, (world // size, size), mesh_dim_names=("dp_replicate", "cp"))
    accelerator._prepare_device_mesh = lambda: mesh  # its loaders ask for it
    accelerator.dataloader_config.dispatch_batches = False  # also of data without a length: every rank reads it
    accelerator._prepare_cp = lambda *prepared: prepared
    accelerator.maybe_context_parallel = lambda *args, **kwargs: nullcontext()
    distribute_attention(model, group=mesh["cp"].get_group(), config=config)
    take_whole_batches(transformers_model(model))
    known = known or _Models(size, mesh)
    known.models.add(model)
    setattr(accelerator, _MODELS, known)
    accelerator.gather_for_metrics = functools.partial(_gather, accelerator, known)
    return size


_MODELS = "_dfa_models"
"""The attribute of an accelerator that holds its `_Models`."""


@dataclass(frozen=True, slots=True)
class _Models:
    """Hold the models of an accelerator, such as a student and its teacher, and the ranks that share sequences."""

    size: int
    mesh: Any
    models: set[torch.nn.Module] = field(default_factory=set)


def _gather(accelerator: Any, known: _Models, values: Any, use_gather_object: bool = False) -> Any:
    """Gather for metrics: while any model trains from all ranks, in evaluation from one rank of each group.

    What accelerate's loader repeated to fill the last batch is left out, as in its own function.
    """
    ACCELERATOR.check(objects=use_gather_object or not all(isinstance(x, torch.Tensor) for x in tree_leaves(values)))
    whole = accelerator.gather(values)
    if any(model.training for model in known.models):
        return whole
    state = accelerator.gradient_state
    data = getattr(state.active_dataloader, "dataset", None)
    streamed = isinstance(data, torch.utils.data.IterableDataset) and state.remainder < 0
    ACCELERATOR.check(streamed=streamed and known.size < accelerator.num_processes)
    rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def once(value: torch.Tensor) -> torch.Tensor:
        groups = value.unflatten(0, (-1, known.size, value.shape[0] // accelerator.num_processes))
        first: torch.Tensor = groups[:, 0].flatten(0, 1)
        return first[:rows]

    return tree_map_only(torch.Tensor, once, whole)
