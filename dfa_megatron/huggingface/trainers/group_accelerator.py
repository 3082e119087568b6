"""An Accelerator whose processes are the groups of ranks that share sequences.

Its loaders, schedulers, sums and numbers are those of one process for each group. Nothing of accelerate is imported:
the classes of an accelerator and of its schedulers get subclasses.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dfa_megatron.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Sharing:
    """Hold the ranks that share sequences.

    trained: the model of a Trainer. None for the accelerator of a loop.
    """

    size: int
    trained: torch.nn.Module | None


def refuse_objects() -> NoReturn:
    """Refuse to gather what is no tensor.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "gather_for_metrics of objects (use_gather_object, eval_use_gather_object)",
        "what the ranks of a sequence hold in common could not be told apart",
        "tensors",
    )


class SharesSequences:
    """Replace what accelerate counts by processes; the first base of the class of an accelerator with a `Sharing`."""

    _dfa_sharing: Sharing
    _dfa_index_of_group = False

    @contextmanager
    def indexed_by_groups(self) -> Iterator[None]:
        """Let `process_index`, by which files are named otherwise, be that of the group for a while."""
        before, self._dfa_index_of_group = self._dfa_index_of_group, True
        try:
            yield
        finally:
            self._dfa_index_of_group = before

    @property
    def process_index(self) -> int:
        """The rank, or within `indexed_by_groups` the group."""
        rank: int = super().process_index  # type: ignore[misc]
        return rank // self._dfa_sharing.size if self._dfa_index_of_group else rank

    @property
    def num_processes(self) -> int:
        """The groups of ranks; it scales schedules, sums and counts of labels."""
        ranks: int = super().num_processes  # type: ignore[misc]
        return ranks // self._dfa_sharing.size

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank, which accelerate finds by the number of processes."""
        last: bool = self.state.is_last_process  # type: ignore[attr-defined]
        return last

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader that gives the ranks of a group the same batches."""
        with self.indexed_by_groups():
            return super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]

    def _prepare_device_mesh(self) -> None:
        """Return no mesh: loaders count processes."""

    def _prepare_deepspeed(self, *args: Any) -> Any:
        install = importlib.import_module("dfa_megatron.deepspeed.install")  # which imports this package
        with install.installed():
            prepared = super()._prepare_deepspeed(*args)  # type: ignore[misc]
        for scheduler in self._schedulers:  # type: ignore[attr-defined]
            self._step_by_groups(scheduler)
        return prepared

    def _prepare_cp(self, *prepared: Any) -> tuple[Any, ...]:
        return prepared

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Leave accelerate's own context parallelism out."""
        return nullcontext()

    def split_between_processes(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to give the ranks of a group different inputs.

        Raises:
            UnsupportedError: always.
        """
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
        size = self._dfa_sharing.size
        return tree_map_only(
            torch.Tensor, lambda x: x / size if x.is_floating_point() or x.is_complex() else x // size, found
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from one rank of each group, without what the loader repeated to fill the last batch."""
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(input_data)):
            refuse_objects()
        whole = self.gather(input_data)
        sharing = self._dfa_sharing
        state = self.gradient_state  # type: ignore[attr-defined]
        data = getattr(state.active_dataloader, "dataset", None)
        streamed = isinstance(data, torch.utils.data.IterableDataset) and state.remainder < 0
        ranks = self.state.num_processes  # type: ignore[attr-defined]
        if streamed and sharing.size < ranks and not (sharing.trained is not None and sharing.trained.training):
            raise UnsupportedError(
                "evaluation on data without a length, by several groups of ranks",
                "what repeats to fill the last batch could not be told apart",
                "a data set with a length, or size of all ranks",
            )
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return tree_map_only(torch.Tensor, lambda value: value[:rows], whole)

    def gather(self, tensor: Any) -> Any:
        """Gather from the first rank of each group."""
        size, ranks = self._dfa_sharing.size, self.state.num_processes  # type: ignore[attr-defined]

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
