"""Let a loop around accelerate train and evaluate with sequences that ranks share, with DDP, FSDP2 or DeepSpeed.

An accelerator's processes become the groups of ranks that share sequences: its loaders, schedulers, sums and numbers
are those of one process for each group. Nothing of accelerate is imported: an accelerator gets a subclass of its class.
Its own context parallelism is refused: it cuts tensors in place, drops masks, and computes causal SDPA only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.huggingface.distribute import distribute_attention, transformers_model
from dfa_megatron.huggingface.join_outputs import classifies, join_outputs
from dfa_megatron.huggingface.mesh import make_mesh
from dfa_megatron.runtime.comm.groups import group_size


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
        size: the ranks that share a sequence; None is that of DeepSpeed's JSON, or of `add_cp_backend`, else all.
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
    """Refuse a first argument without a method of what it should be."""
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
        loop: a loop of the user's runs the model, and no Trainer.
        scores: as of `join_outputs`.
    """
    world = accelerator.state.num_processes
    _check(accelerator)
    if getattr(accelerator, "_dfa_by_config", False):
        size, config = size or accelerator._dfa_size, config or accelerator._dfa_config
    options = TrainingConfig.of(config)
    if accelerator.distributed_type == "DEEPSPEED":
        json_block = importlib.import_module("dfa_megatron.deepspeed.json_block")  # which imports this package
        block = json_block.block_of(accelerator, size, config, unlisted=unlisted)
        size, options, unlisted = block.size, block.options, block.unlisted
    size = world if size is None else size
    _check_size(accelerator, size, loop=loop)
    if world == 1:
        if (ranks := group_size(None)) > 1:
            what = f"an accelerator of one process among {ranks} ranks of torch.distributed"
            instead = "torchrun or accelerate launch, which it reads when it, or TrainingArguments, is made"
            raise UnsupportedError(what, "it would average no gradients over them", instead)
        distribute_attention(model, config=options, unlisted=unlisted)
        return 1
    distribute_attention(model, group=make_mesh(size).group, config=options, unlisted=unlisted)
    if not classifies(inner := transformers_model(model)):
        join_outputs(inner, scores=scores)
    _count_groups(accelerator, size)
    if not loop and accelerator._dfa_trained is None:
        accelerator._dfa_trained = model
    return size


def share_by_config(accelerator: Any, size: int, config: TrainingConfig | None) -> None:
    """Let an accelerator that was just made count groups of ranks; its `prepare` distributes the models of a loop."""
    _check(accelerator)
    _check_size(accelerator, size, loop=True)
    _count_groups(accelerator, size)
    accelerator._dfa_by_config, accelerator._dfa_config = True, config


def _count_groups(accelerator: Any, size: int) -> None:
    """Give an accelerator the class that counts groups, once."""
    kind = type(accelerator)
    if not issubclass(kind, SharesSequences):
        accelerator.dataloader_config.dispatch_batches = False  # also of data without a length: every rank reads it
        accelerator._dfa_size = size
        accelerator.__class__ = type(kind.__name__, (SharesSequences, kind), {})


def _check_size(accelerator: Any, size: int, *, loop: bool) -> None:
    """Refuse a number of ranks that does not fit, or that comes too late for a loop's loaders."""
    world, known = accelerator.state.num_processes, getattr(accelerator, "_dfa_size", None)
    if size < 1 or world % size:
        why = "groups of that many ranks do not use all of them"
        raise UnsupportedError(f"size={size} on {world} ranks", why, f"a divisor of {world}")
    if known is not None and size != known:
        raise UnsupportedError(
            f"size={size} for a second model",
            f"the accelerator's loaders give one batch to {known} ranks",
            "the same size for all models of an accelerator",
        )
    if loop and known is None and world > 1 and (accelerator._schedulers or accelerator._dataloaders):
        why = "its loaders would give the ranks of a sequence different batches, and schedulers step once for each rank"
        raise UnsupportedError("distribute_accelerator behind accelerator.prepare", why, "the call before prepare")


def _check(accelerator: Any) -> None:
    """Refuse what an accelerator was told to do with batches or models."""
    for name in ("cp_size", "sp_size", "tp_size"):
        theirs = getattr(accelerator.parallelism_config, name, 1)
        if theirs > 1:
            raise UnsupportedError(
                f"ParallelismConfig({name}={theirs})",
                "accelerate would cut the batches or the model too",
                "size=, and a ParallelismConfig of dp sizes, or none; or add_cp_backend() and cp_backend='dfa'",
            )
    if accelerator.distributed_type == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version == 1:
        why = "its flat parameters were never compared with one process"
        instead = "fsdp_version=2 of the FullyShardedDataParallelPlugin, or fsdp_config={'version': 2} of a Trainer"
        raise UnsupportedError("FSDP1 of accelerate", why, instead)
    if accelerator.dispatch_batches:
        why = "the first rank would hand the ranks of a sequence different batches"
        raise UnsupportedError("dispatch_batches=True", why, "dispatch_batches=False, or None")
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != "NO":
        backend = dynamo.value.lower()
        what = f"torch_compile, or the dynamo backend {backend!r} of accelerate"
        why = "transformers then asks for masks that are not planned"
        raise UnsupportedError(what, why, "no dynamo_backend, torch_compile=False")


def refuse_objects() -> NoReturn:
    """Refuse to gather what is no tensor."""
    why = "what the ranks of a sequence hold in common could not be told apart"
    raise UnsupportedError("gather_for_metrics of objects (use_gather_object, eval_use_gather_object)", why, "tensors")


class SharesSequences:
    """Replace what accelerate counts by processes; the first base of the class of an accelerator whose ranks share.

    _dfa_size: the ranks that share a sequence.
    _dfa_trained: the model of a Trainer. None for a loop, or for a Trainer that is not yet distributed.
    _dfa_by_config: whether accelerate's config asked for it, with `_dfa_config` or the default.
    """

    _dfa_size: int
    _dfa_trained: torch.nn.Module | None = None
    _dfa_by_config = False
    _dfa_config: TrainingConfig | None = None
    _dfa_index_of_group = False

    def indexed_by_groups(self) -> AbstractContextManager[None]:
        """Let `process_index`, by which files are named otherwise, be that of the group for a while."""
        return for_a_while(self, _dfa_index_of_group=True)

    @property
    def process_index(self) -> int:
        """The rank, or within `indexed_by_groups` the group."""
        rank: int = super().process_index  # type: ignore[misc]
        return rank // self._dfa_size if self._dfa_index_of_group else rank

    @property
    def num_processes(self) -> int:
        """The groups of ranks; it scales schedules, sums and counts of labels."""
        ranks: int = super().num_processes  # type: ignore[misc]
        return ranks // self._dfa_size

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank, which accelerate finds by the number of processes."""
        last: bool = self.state.is_last_process  # type: ignore[attr-defined]
        return last

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare what a loop trains; accelerate's config may ask to distribute its models first."""
        if self._dfa_by_config and self._dfa_trained is None:
            for model in args:
                if isinstance(model, torch.nn.Module):
                    share_sequences(self, model, None, None, loop=True)
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader that gives the ranks of a group the same batches."""
        with self.indexed_by_groups():
            seeds = getattr(getattr(data_loader, "worker_init_fn", None), "keywords", {})
            if "rank" in seeds:  # of a Trainer's workers
                seeds["rank"] = self.process_index
            return super().prepare_data_loader(data_loader, *args, **kwargs)  # type: ignore[misc]

    def _prepare_device_mesh(self) -> None:
        """Return no mesh: loaders count processes."""

    def _prepare_deepspeed(self, *args: Any) -> Any:
        install = importlib.import_module("dfa_megatron.deepspeed.install")  # which imports this package
        with install.installed():
            prepared = super()._prepare_deepspeed(*args)  # type: ignore[misc]
        for scheduler in self._schedulers:  # type: ignore[attr-defined]
            self._step_by_groups(scheduler)
        return prepared

    def split_between_processes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to give the ranks of a group different inputs."""
        raise UnsupportedError(
            "split_between_processes of an accelerator whose ranks share sequences",
            "the ranks of a sequence would get different inputs",
            "a loader of accelerator.prepare",
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once for each group of ranks, not for each rank."""
        return self._step_by_groups(super().prepare_scheduler(scheduler))  # type: ignore[misc]

    def _step_by_groups(self, prepared: Any) -> Any:
        if not prepared.split_batches:
            prepared.split_batches = True  # with which accelerate's own method steps once
            prepared.step = functools.partial(_step, prepared, prepared.step, self.num_processes)
        return prepared

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the groups."""
        found = super().reduce(tensor, reduction, scale)  # type: ignore[misc]
        if reduction in ("mean", "max"):
            return found
        size = self._dfa_size
        return tree_map_only(
            torch.Tensor, lambda x: x / size if x.is_floating_point() or x.is_complex() else x // size, found
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from one rank of each group, without what the loader repeated to fill the last batch."""
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(input_data)):
            refuse_objects()
        state, trained = self.gradient_state, self._dfa_trained  # type: ignore[attr-defined]
        data = getattr(state.active_dataloader, "dataset", None)
        streamed = isinstance(data, torch.utils.data.IterableDataset) and state.remainder < 0
        ranks = self.state.num_processes  # type: ignore[attr-defined]
        if streamed and self._dfa_size < ranks and not (trained is not None and trained.training):
            raise UnsupportedError(
                "evaluation on data without a length, by several groups of ranks",
                "what repeats to fill the last batch could not be told apart",
                "a data set with a length, or size of all ranks",
            )
        return super().gather_for_metrics(input_data)  # type: ignore[misc]

    def gather(self, tensor: Any) -> Any:
        """Gather from the first rank of each group."""
        size, ranks = self._dfa_size, self.state.num_processes  # type: ignore[attr-defined]

        def first(value: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = value.unflatten(0, (-1, size, value.shape[0] // ranks))[:, 0].flatten(0, 1)
            return found

        return tree_map_only(torch.Tensor, first, super().gather(tensor))  # type: ignore[misc]


def _step(scheduler: Any, own: Callable[..., None], groups: int, *args: Any, **kwargs: Any) -> None:
    """Step once for each group, as accelerate does, which leaves a schedule of one cycle that has ended as it is."""
    inner, steps = scheduler.scheduler, scheduler.step_with_optimizer and scheduler.gradient_state.sync_gradients
    for _ in range(groups if steps else 1):
        if not (steps and hasattr(inner, "total_steps") and inner._step_count > inner.total_steps):
            own(*args, **kwargs)
