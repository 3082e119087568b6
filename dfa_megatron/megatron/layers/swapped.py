"""The context-parallel groups of a model: trainers swap them after the build, to evaluate at another size.

Megatron-Bridge does so on every module (eval_context_parallel_size). All must name one group, that of the model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError

_NAMES = ("pg_collection", "cp_group")

Holder = tuple[Any, str]
"""Who holds a group, or a collection of groups, and the attribute."""

ONE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A stand-in for a context-parallel group of one rank, in modules of Megatron that ask it for nothing else."""


def group_holders(module: torch.nn.Module) -> list[Holder]:
    """Return what holds a context-parallel group in a module: its modules, and the exchanges of Megatron's mixers."""
    mixers = [vars(each).get("cp") for each in module.modules()]
    named = [each for each in mixers if isinstance(getattr(each, "cp_group", None), dist.ProcessGroup)]
    return [(each, name) for each in (*module.modules(), *named) for name in _NAMES if name in vars(each)]


def state_group() -> Any:
    """Return the context-parallel group of Megatron's global state, by which its scripts cut batches, or None."""
    from megatron.core import parallel_state

    return vars(parallel_state)["_CONTEXT_PARALLEL_GROUP"]


def check_groups(holders: list[Holder], group: Any, built: Any = None) -> None:
    """Refuse modules that hold another group than that of the call.

    built: what `state_group` was when the model was built; if it changed, it must be `group`.
    """
    others = []
    for holder, name in holders:
        found = getattr(holder, name)
        if (found.cp if name == "pg_collection" and found is not None else found) not in (group, None):
            others.append(f"{type(holder).__name__}.{name}")
    if built is not None and state_group() not in (built, group):
        others.append("megatron.core.parallel_state")
    if others:
        raise UnsupportedError(
            f"a model whose groups were replaced in part ({others[0]} is another)",
            "its layers would mistake the order of the tokens",
            "the same group in every pg_collection and cp_group of the model, as Megatron-Bridge's "
            "eval_context_parallel_size swaps them; or local_cp_size and cp_group in packed_seq_params",
        )


def check_size(config: Any, group: dist.ProcessGroup) -> None:
    """Refuse a config of another context-parallel size than its group's."""
    if (ranks := group.size()) != config.context_parallel_size:
        raise UnsupportedError(
            f"context_parallel_size={config.context_parallel_size} in the config of a layer whose context-parallel "
            f"group has {ranks} ranks",
            "the layers would mistake the order of the tokens",
            "the same number in both",
        )
