"""Let accelerate count groups of ranks as its processes, where the JSON's block shares sequences among their ranks.

It steps prepared schedulers once for each process, and scripts multiply the length of schedules by `num_processes`. Its
loaders still give every rank batches of its own, of which DeepSpeed's adapter makes the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from dfa_megatron.errors import UnsupportedError

_BY_RANKS: ContextVar[bool] = ContextVar("a loader is being prepared", default=False)


def replacements(shared_by: Callable[[Any], int]) -> list[tuple[Any, str, Any]]:
    """Return what takes the place of accelerate's own: the class, the name, and the new value.

    Args:
        shared_by: returns the ranks that share a sequence, for an `AcceleratorState`.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    own = Accelerator.prepare_data_loader

    def processes(state: Any) -> int:
        if "num_processes" not in vars(state):
            raise AttributeError("num_processes")  # accelerate says why
        ranks: int = vars(state)["num_processes"]
        return ranks if _BY_RANKS.get() or ranks == 1 else ranks // shared_by(state)  # on CPUs it may know one only

    def is_last(accelerator: Any) -> bool:
        last: bool = accelerator.state.is_last_process
        return last

    @functools.wraps(own)
    def prepare_data_loader(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        size = shared_by(accelerator.state)
        if size > 1 and accelerator.split_batches:
            raise UnsupportedError(
                f"split_batches with ParallelismConfig(sp_size={size})",
                "a step would take the sequences of a batch divided by sp_size, and schedules would end too early",
                "split_batches=False",
            )
        token = _BY_RANKS.set(True)
        try:
            return own(accelerator, *args, **kwargs)
        finally:
            _BY_RANKS.reset(token)

    return [
        (AcceleratorState, "num_processes", property(processes)),
        (Accelerator, "is_last_process", property(is_last)),
        (Accelerator, "prepare_data_loader", prepare_data_loader),
    ]
