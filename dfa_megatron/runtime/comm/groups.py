"""Process groups by name, as operators take them, and as whatever outlives a call keeps them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dfa_megatron.errors import UnsupportedError

Group = dist.ProcessGroup | str | None
"""A process group, its name, or None for the default group (a single process where there is none)."""


def group_name(group: Group) -> str:
    """The name that the operator takes for a group; "" is a single process.

    Raises:
        UnsupportedError: this process is no member of the group.
    """
    if isinstance(group, str):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group = dist.group.WORLD
    assert group is not None
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]  # as new_group returns it
        raise _no_member("a process group that this rank is no member of")
    return str(group.group_name)


def group_size(name: str) -> int:
    """How many ranks a named group has."""
    return resolve(name).size() if name else 1


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of that name; operators can take names, but no groups.

    Raises:
        UnsupportedError: this process knows no such group.
    """
    try:
        group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    except (KeyError, RuntimeError, ValueError) as error:
        raise _no_member(f"a process group named {name!r}, which this rank does not know") from error
    return group


def _no_member(what: str) -> UnsupportedError:
    return UnsupportedError(what, "this rank holds no tokens of its sequence", "a group that contains this rank")


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group waits for its ranks, as its maker said; None, a backend's default, where that is not told."""
    found = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return next((options._timeout for options in found if options is not None), None)


def is_known(group: dist.ProcessGroup | None) -> bool:
    """Whether a group still is one of torch.distributed's."""
    return group is not None and group in distributed_c10d._world.pg_map


Release = Callable[[dist.ProcessGroup | None], None]


def before_destroying(release: Release) -> None:
    """Have this called when torch.distributed.destroy_process_group is about to destroy a group (None: all groups).

    PyTorch has no hook for it, so its function is wrapped, once and for as long as the process lives.
    """
    _releases()[release] = None


@functools.cache
def _releases() -> dict[Release, None]:
    releases: dict[Release, None] = {}
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        for release in releases:
            release(None if group is dist.group.WORLD else group)
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy_process_group
    return releases
