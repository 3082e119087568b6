"""Process groups as callers give them, and by the names that operators take and that outlive a group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dfa_megatron.errors import UnsupportedError

Group = dist.ProcessGroup | DeviceMesh | str | None
"""A process group, a one-dimensional mesh, a group's name, or None: the default group, or this process without one.

The order of the ranks in the group or mesh is the order of their tokens.
"""


def resolve(group: Group) -> dist.ProcessGroup | None:
    """Return the process group that a caller means; None where this process has none.

    Raises:
        UnsupportedError: this process is no member of the group, or the mesh has several dimensions.
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


def is_known(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group has not been destroyed."""
    return group is not None and group in distributed_c10d._world.pg_map
