"""Let a loop around accelerate train and evaluate with sequences that ranks share, with DDP, FSDP2 or DeepSpeed.

accelerate's loaders give the ranks of a group the same batches. Its own context parallelism is left out: it cuts
tensors in place, drops masks, and computes causal SDPA only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.call_checks import LEFT_OUT
from dfa_megatron.huggingface.distribute import distribute_attention, transformers_model
from dfa_megatron.huggingface.mesh import make_mesh
from dfa_megatron.huggingface.trainers.group_accelerator import SharesSequences, Sharing
from dfa_megatron.huggingface.trainers.join_outputs import join_outputs


def distribute_accelerator(
    accelerator: Any,
    model: torch.nn.Module,
    *,
    size: int | None = None,
    config: TrainingConfig | None = None,
    unlisted: bool = False,
) -> int:
    """Share each sequence of an accelerate loop among consecutive ranks; a collective call before `prepare`.

    The loop then is that of one process for each group of ranks, whose batches the ranks of a group get alike. The
    model takes such a batch whole and cuts it. Every rank gets the loss of the whole batch, and in evaluation the
    logits of all tokens. `num_processes`, `gather`, `reduce` and `gather_for_metrics` count a group once, and prepared
    schedulers step once for each group: call this before `num_processes` is read. `accelerate.state.PartialState` still
    knows all ranks. It may be called again.

    Args:
        accelerator: an `accelerate.Accelerator`, with DDP, FSDP2 or DeepSpeed.
        model: a transformers model, or a module that holds one (PEFT).
        size: the ranks that share a sequence; None is that of DeepSpeed's JSON, or `ParallelismConfig.cp_size` where
            that is more than 1, else all.
        config: schedule, kernel, checkpoint and the like; with DeepSpeed, None is the block of its JSON.
        unlisted: as of `distribute_attention`.

    Returns:
        The ranks that share a sequence.

    Raises:
        UnsupportedError: the accelerator or the model needs something unsupported; the message names it.
    """
    check_given("distribute_accelerator", accelerator, "prepare")
    return share_sequences(accelerator, model, size, config, loop=True, unlisted=unlisted)


def check_given(function: str, given: Any, method: str) -> None:
    """Refuse a first argument without a method of what it should be.

    Raises:
        UnsupportedError: it has none.
    """
    if not hasattr(given, method):
        instead = f"{function}({function.removeprefix('distribute_')}), or distribute_attention(model)"
        raise UnsupportedError(f"{function} of a {type(given).__name__}", f"it has no method {method}", instead)


def share_sequences(
    accelerator: Any,
    model: torch.nn.Module,
    size: int | None,
    config: TrainingConfig | None,
    *,
    loop: bool,
    scores: bool = False,
    unlisted: bool = False,
) -> int:
    """Prepare an accelerator and a model, for a loop or for a Trainer, which counts the ranks of a sequence itself.

    Args:
        scores: as of `join_outputs`.
    """
    world, parallel = accelerator.state.num_processes, accelerator.parallelism_config
    known: Sharing | None = getattr(accelerator, "_dfa_sharing", None)
    _check(accelerator)
    options, theirs = TrainingConfig.of(config), 1 if parallel is None else parallel.cp_size
    if accelerator.distributed_type == "DEEPSPEED":
        accelerate = importlib.import_module("dfa_megatron.deepspeed.accelerate")  # which imports this package
        block = accelerate.block_of(accelerator, size, config, unlisted=unlisted)
        size, options, unlisted = block.size, block.options, block.unlisted
    size = (theirs if theirs > 1 else world) if size is None else size
    _check_size(accelerator, size, known, loop=loop)
    if world == 1:
        distribute_attention(model, config=options, unlisted=unlisted)
        return 1
    if parallel is not None:
        setattr(parallel, LEFT_OUT, True)
    distribute_attention(model, group=make_mesh(size).group, config=options, unlisted=unlisted)
    join_outputs(transformers_model(model), scores=scores)
    if known is None:
        accelerator.dataloader_config.dispatch_batches = False  # also of data without a length: every rank reads it
        accelerator._dfa_sharing = Sharing(size, None if loop else model)
        kind = type(accelerator)
        accelerator.__class__ = type(kind.__name__, (SharesSequences, kind), {})
    return size


def _check_size(accelerator: Any, size: int, known: Sharing | None, *, loop: bool) -> None:
    """Refuse a number of ranks that does not fit, or that comes too late for a loop's loaders."""
    world, parallel = accelerator.state.num_processes, accelerator.parallelism_config
    theirs = 1 if parallel is None else parallel.cp_size
    if size < 1 or world % size:
        raise UnsupportedError(
            f"size={size} on {world} ranks", "groups of that many ranks do not use all of them", f"a divisor of {world}"
        )
    if theirs not in (1, size):
        raise UnsupportedError(
            f"size={size} beside ParallelismConfig(cp_size={theirs})",
            "the ranks of cp share each sequence",
            "one of them",
        )
    if known is not None and size != known.size:
        raise UnsupportedError(
            f"size={size} for a second model",
            f"the accelerator's loaders give one batch to {known.size} ranks",
            "the same size for all models of an accelerator",
        )
    if loop and known is None and world > 1 and (accelerator._schedulers or accelerator._dataloaders):
        raise UnsupportedError(
            "distribute_accelerator behind accelerator.prepare",
            "its loaders would give the ranks of a sequence different batches, and schedulers step once for each rank",
            "the call before prepare",
        )


def _check(accelerator: Any) -> None:
    """Refuse what an accelerator was told to do with batches or models."""
    for name in ("sp_size", "tp_size"):
        theirs = getattr(accelerator.parallelism_config, name, 1)
        if theirs > 1:
            raise UnsupportedError(
                f"ParallelismConfig({name}={theirs})",
                "accelerate would cut the batches or the model too",
                "size=, and a ParallelismConfig of cp_size and dp sizes, or none",
            )
    if accelerator.distributed_type == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise UnsupportedError(
            "FSDP1 of accelerate",
            "its flat parameters were never compared with one process",
            "fsdp_version=2 of the FullyShardedDataParallelPlugin, or fsdp_config={'version': 2} of a Trainer",
        )
    if accelerator.dispatch_batches:
        raise UnsupportedError(
            "dispatch_batches=True",
            "the first rank would hand the ranks of a sequence different batches",
            "dispatch_batches=False, or None",
        )
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != "NO":
        backend = dynamo.value.lower()
        raise UnsupportedError(
            f"torch_compile, or the dynamo backend {backend!r} of accelerate",
            "transformers then asks for masks that are not planned",
            "no dynamo_backend, torch_compile=False",
        )
