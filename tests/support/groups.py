"""Process groups that tests ask for."""

from __future__ import annotations

import torch.distributed as dist


def alone() -> dist.ProcessGroup:
    """A group of this rank only; the others need not know of it."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
