"""Process groups as callers give them, and the channels of this process, which end with their groups."""

from __future__ import annotations

import atexit
import functools
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.agreement.store import nothing
from dfa_megatron.runtime.comm.channel import Channel

Group = dist.ProcessGroup | DeviceMesh | str | None
"""A process group, a one-dimensional mesh, a group's name, or None: the default group, or this process without one.

The order of the ranks in the group or mesh is the order of their tokens.
"""


def resolve(group: Group) -> dist.ProcessGroup | None:
    """Return the process group that a caller means; None where this process has none.

    A group without this process, and a mesh of several dimensions, are refused.
    """
    if isinstance(group, str) and group:
        return _named(group)
    if group is None or group == "":
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if group == "":
            instead = "dist.new_group([rank], use_local_synchronization=True) for attention on one rank of several"
            raise UnsupportedError("group=''", "no process group has this name", instead)
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        return _of_mesh(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]  # as new_group returns it
        raise _no_member("a process group that this rank is no member of")
    if not isinstance(group, dist.ProcessGroup):
        instead = "a ProcessGroup, a DeviceMesh, a group's name or None"
        raise UnsupportedError(f"group={group!r}", "it is no process group", instead)
    return group


def group_name(group: Group) -> str:
    """Return the name that the operator takes for a group; "" is a process without process groups."""
    if isinstance(group, str) and group:
        return group
    found = resolve(group)
    return "" if found is None else str(found.group_name)


def group_size(group: Group) -> int:
    """Return the number of ranks of a group; a process without process groups is one."""
    found = resolve(group)
    return 1 if found is None else found.size()


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist()
    if mesh.ndim != 1:
        example = f'mesh["{names[-1]}"]' if names else 'mesh["cp"], of a mesh whose dimensions have names'
        what = f"group=a DeviceMesh of {mesh.ndim} dimensions {tuple(names) or tuple(mesh.mesh.shape)}"
        raise UnsupportedError(what, "a sequence is shared along one of them", f"that dimension: group={example}")
    if mesh.get_coordinate() is None:
        raise _no_member(f"a DeviceMesh of ranks {ranks}")
    group = mesh.get_group()
    if dist.get_process_group_ranks(group) != ranks:
        why = "tokens follow the order of the mesh, and its process group has another"
        raise UnsupportedError(f"group=a DeviceMesh of ranks {ranks}", why, "a mesh whose ranks ascend")
    return group


def _named(name: str) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type,unused-ignore]
    except (KeyError, RuntimeError, ValueError) as error:
        raise _no_member(f"a process group named {name!r}, which this rank does not know") from error
    return group


def _no_member(what: str) -> UnsupportedError:
    return UnsupportedError(what, "this rank holds no tokens of its sequence", "a group that contains this rank")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout with which the group was made, or PyTorch's own if its backend does not tell."""
    found = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    known: timedelta | None = next((options._timeout for options in found if options is not None), None)
    return known or timedelta(minutes=30)


_channels: dict[str, Channel] = {}


def channel_of(group: Group, *, verify: bool | None = None) -> Channel | None:
    """Return the channel of a group of several ranks, None of one rank.

    The first call for a group must be made by all of its ranks; other ranks need not take part. Every rank makes its
    channels in the order in which it first uses its groups.

    verify: whether calls are compared, and watched from now on; None leaves that as it is.
    """
    found = resolve(group)
    if found is None or found.size() == 1:
        return None
    known = _channels.get(found.group_name)
    if known is None or known.closed or known.group() is not found:
        return _make(found, verify is not False)
    if verify and known._watched is None:
        known.watch()
    return known


def channels() -> list[Channel]:
    """Return the open channels of this process; another thread may close some meanwhile."""
    return [known for known in list(_channels.values()) if not known.closed]


def _make(group: dist.ProcessGroup, verify: bool) -> Channel:
    _close_at_exit()
    # The watch closes the channels of destroyed groups; with verify="off" there is none. And a name may be back.
    for name, old in list(_channels.items()):
        if not old.alive():
            old.close()
            del _channels[name]
    made = _channels[str(group.group_name)] = Channel(group, timeout_of(group), verify=verify)
    return made


@functools.cache
def _close_at_exit() -> None:
    """Have threads and connections end before the interpreter does: a thread inside of gloo or NCCL would abort it."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_lose_all)


def _lose_all() -> None:
    """Refuse further attention in a fork, which has no watch, and whose connections are its parent's."""
    atexit.unregister(_close_all)
    what, why = "attention in a fork of a process that has run it", "its threads and connections stay with that process"
    error = UnsupportedError(what, why, "processes that are spawned, with groups of their own")
    for known in channels():
        known.calls.when_lost = nothing  # it takes a lock, which a thread of the parent may have held
        known.calls.lose(error, told=False)


def _close_all() -> None:
    for known in channels():
        known.close()
