"""Group the ranks: consecutive ranks share a sequence, and the groups are data parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime.agreement.calls import by_rank
from dfa_megatron.runtime.agreement.store import GroupStore
from dfa_megatron.runtime.comm.groups import timeout_of


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of this rank.

        rank            0  1  2  3      4  5  6  7       size = 4
        sequence_rank   0  1  2  3      0  1  2  3
        data_rank       0  0  0  0      1  1  1  1       data_size = 2

    group: the ranks that share this rank's sequence, in the order of their tokens.
    """

    group: dist.ProcessGroup
    size: int
    sequence_rank: int
    data_rank: int
    data_size: int


def make_mesh(size: int | None = None, *, stages: int = 1) -> Mesh:
    """Make the groups of `size` consecutive ranks; a collective call of all ranks, whose groups are made once.

    Args:
        size: ranks that share a sequence; all ranks of a stage if None.
        stages: the number of stages of a pipeline. The ranks of a stage are consecutive, as
            `PipelineModule(num_stages=...)` places them.

    Raises:
        UnsupportedError: size does not divide the number of ranks of a stage.
        AbsentError, DisagreementError: a rank does not come within a quarter of the timeout, or asks for another size.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if stages < 1 or world % stages:
        asked = f"{stages} stages on {world} ranks"
        raise UnsupportedError(asked, "every stage has the same number of ranks", "a number that divides the ranks")
    ranks = world // stages
    size = ranks if size is None else size
    if size < 1 or ranks % size:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        asked = f"a sequence on {size} of {ranks} ranks"
        raise UnsupportedError(asked, "every rank belongs to one group of that size", f"size {divisors}")
    place = rank % ranks
    return Mesh(_group(size), size, place % size, place // size, ranks // size)


_groups: dict[int, tuple[Any, dist.ProcessGroup]] = {}
"""This rank's group by its size, with the default group that it was made under."""


def _group(size: int) -> dist.ProcessGroup:
    default, known = _groups.get(size, (None, None))
    if known is not None and default is dist.group.WORLD:
        return known
    assert dist.group.WORLD is not None
    timeout = timeout_of(dist.group.WORLD)
    seconds = timeout.total_seconds() / 4  # PyTorch would wait for ever for a rank that does not come
    _, sizes = GroupStore.of_group(dist.group.WORLD, str(size), seconds)
    if len({*sizes}) > 1:
        raise DisagreementError(f"ranks ask for groups of different sizes: {by_rank(sizes)}. What works: one size")
    own: dist.ProcessGroup = dist.new_subgroups(size, timeout=timeout)[0]
    _groups[size] = (dist.group.WORLD, own)
    return own
