"""The ranks that share a micro-batch, where it names its own (Megatron's hybrid and dynamic context parallelism)."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError

_ALONE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The group of this rank alone, by the default group under which it was made."""


def group_of(params: Any) -> dist.ProcessGroup | None:
    """Return the process group that a PackedSeqParams names, or None for the model's context-parallel group.

    local_cp_size=1 without cp_group is this rank alone, as in Megatron.

    Raises:
        UnsupportedError: the group does not hold this rank, or its size is not local_cp_size.
    """
    group, size = params.cp_group, params.local_cp_size
    if group is None and size in (None, 1):
        return None if size is None else _alone()
    holds = group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and dist.get_rank(group) >= 0
    if not holds or size not in (None, group.size()):
        ranks = "no cp_group" if group is None else f"a cp_group of {group.size()} ranks" if holds else "that of others"
        raise UnsupportedError(
            f"packed_seq_params with local_cp_size={size} and {ranks}",
            "the ranks that share the micro-batch are unknown, or this rank has none of its tokens",
            "the group of this rank with local_cp_size ranks; without one, local_cp_size=1",
        )
    return group  # type: ignore[no-any-return]


def _alone() -> dist.ProcessGroup:
    """Return the group of this rank; made once, without the other ranks."""
    whole = dist.group.WORLD
    assert whole is not None, "Megatron runs on process groups"
    if whole not in _ALONE:
        _ALONE[whole] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[whole]
