"""The channels of this process by the name of their group: made at the first attention, closed with the group."""

from __future__ import annotations

import atexit
import functools
import os
import weakref

import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.agreement.store import GroupStore
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import Group, is_known, resolve, timeout_of

_channels: dict[str, tuple[weakref.ref[dist.ProcessGroup], Channel]] = {}


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
    if known is None or known[0]() is not found:
        return _make(found, verify is not False)
    if verify and known[1]._watched is None:
        known[1].watch()
    return known[1]


def channels() -> list[Channel]:
    """Return the channels of this process; another thread may close some meanwhile."""
    return [known for _, known in list(_channels.values())]


def _make(group: dist.ProcessGroup, verify: bool) -> Channel:
    _close_at_exit()
    # The watchdog closes the channels of destroyed groups; with verify="off" there is none. And a name may be back.
    for other, (reference, old) in list(_channels.items()):
        if not is_known(reference()):
            _close(other, old)
    name, reference, timeout = str(group.group_name), weakref.ref(group), timeout_of(group)
    store = GroupStore.of_group(group, timeout.total_seconds() / 4)
    made = Channel(store, timeout, lambda: is_known(reference()), verify=verify)
    made.ended = functools.partial(_close, name, made)
    _channels[name] = reference, made
    return made


def _close(name: str, old: Channel) -> None:
    old.close()
    known = _channels.get(name)
    if known is not None and known[1] is old:
        del _channels[name]


@functools.cache
def _close_at_exit() -> None:
    """Have threads and connections end before the interpreter does: a thread inside of gloo or NCCL would abort it."""
    atexit.register(_close_all)
    os.register_at_fork(after_in_child=_lose_all)


def _lose_all() -> None:
    """Refuse further attention in a fork, which has no watchdog, and whose connections are its parent's."""
    atexit.unregister(_close_all)
    what, why = "attention in a fork of a process that has run it", "its threads and connections stay with that process"
    error = UnsupportedError(what, why, "processes that are spawned, with groups of their own")
    for known in channels():
        known.calls.lose(error, told=False)


def _close_all() -> None:
    for name, (_, known) in list(_channels.items()):
        _close(name, known)
