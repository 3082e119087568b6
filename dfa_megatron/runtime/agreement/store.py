"""The store of a process group: short notes from rank to rank, and waits for them that always come to an end."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from dfa_megatron.errors import AbsentError
from dfa_megatron.runtime.environment import launcher_keeps_store

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOTHING = "-"
"""What `GroupStore.lost` holds while no rank has lost the group."""
REQUESTS = 4000
"""That all processes together make of the store in a second, at most: many processes ask less often."""

LOOKS, MARGIN = 0.05, 2.0
"""Seconds between two checks for errors during a wait, and for which the store may answer late."""
_SHORTEST, _LONGEST = 2e-4, 2e-2
"""Seconds between two looks at a round: short at first, when ranks tend to arrive together, then longer."""


class GroupStore:
    """Notes of the ranks of one group, in the store of the default group: no rank ever blocks in it for another.

    The store itself stops answering if the process that keeps it does.

    Args:
        client: this process's connection to the store; the same for all of its groups.
        name: of the group, the same on all of its ranks. rank: of this process in the group.
        members: global ranks, in the order of the group.

    Attributes:
        key: under which the group's notes are; no other group has or had it.
        keeper: the rank whose process keeps the store, which ends with it; None if none of the group does.
    """

    def __init__(self, client: Store, name: str, rank: int, members: Sequence[int]) -> None:
        self.client, self.rank, self.members, self.size = client, rank, tuple(members), len(members)
        self.keeper = _keeper(members)
        # A group may reuse the name of a destroyed one, whose notes must not be read as new.
        self.key = f"dfa_megatron/{name}/life {client.add(f'dfa_megatron/{name}/lives of {rank}', 1)}"
        self._store = PrefixStore(self.key, client)
        self._stores = 0
        self._longest = max(_LONGEST, (dist.get_world_size() if dist.is_initialized() else 1) / REQUESTS)
        # To read a note that is not there would block. Ranks read these once all have met, so from here on they exist.
        client.compare_set(heartbeat_of(self.members[rank]), "", "{}")
        client.compare_set(self.lost, "", NOTHING)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, note: str, timeout: float) -> tuple[GroupStore, list[str]]:
        """Return the store of a process group, and the first note of every rank, by rank; collective.

        Else an AbsentError names the ranks that did not come in time, or who kept the store, which is gone or stopped.
        """
        members, started = dist.get_process_group_ranks(group), time.monotonic()
        keeper, subject = _keeper(members), "make contact for the first time"
        who = "another process" if keeper is None else named(members, [keeper])

        def meet() -> tuple[GroupStore, list[str | None]]:
            try:
                store = cls(_client(), str(group.group_name), group.rank(), members)
                return store, store.gather("first", note, timeout)
            except RuntimeError as error:
                after = f"after {time.monotonic() - started:.0f} s of coming together to {subject}"
                told = f"the store of the group is gone, {after}: {who}, which kept it, has ended ({error})"
                raise AbsentError(told) from error

        why = f"does not answer within {timeout + MARGIN:.0f} s: {who}, which keeps it, gives no sign of life"
        store, notes = bounded(meet, timeout + MARGIN, overdue=lambda: AbsentError(f"the store of the group {why}"))
        if missing := [rank for rank, theirs in enumerate(notes) if theirs is None]:
            raise AbsentError(f"{named(members, missing)} did not come within {timeout:.0f} s to {subject}")
        return store, [theirs for theirs in notes if theirs is not None]

    @property
    def lost(self) -> str:
        """The key of the error that lost the group: the first rank that fails writes it."""
        return f"{self.key}/lost"

    def fresh(self) -> Store:
        """Return a store that these ranks share for one purpose, and may block; all ranks ask in the same order."""
        self._stores += 1
        return PrefixStore(f"{self.key}/store {self._stores}", _own_client(self.client))

    def gather(self, key: str, note: str, seconds: float) -> list[str | None]:
        """Leave a note and return every rank's, by rank: None of one that has left none until then."""
        keys, started, pause = [f"{key}/{rank}" for rank in range(self.size)], time.monotonic(), _SHORTEST
        self._store.set(keys[self.rank], note)
        while not (complete := self._store.check(keys)) and time.monotonic() - started <= seconds:
            time.sleep(pause)
            pause = min(2 * pause, self._longest)
        there = [complete or self._store.check([each]) for each in keys]
        found = iter(self._store.multi_get([each for each, is_there in zip(keys, there, strict=True) if is_there]))
        return [next(found).decode() if is_there else None for is_there in there]


def heartbeat_of(rank: int) -> str:
    """Return the key of the heartbeat of a global rank."""
    return f"dfa_megatron/heartbeat of {rank}"


def named(members: Sequence[int], ranks: Sequence[int]) -> str:
    """Return how errors name ranks of a group, with their global ranks if these differ."""
    found = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of the group"
    same = all(members[rank] == rank for rank in ranks)
    return found if same else f"{found} (global {listed([members[rank] for rank in ranks])})"


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text: all of them, or the first two and their number."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)} of them)"


def nothing() -> None:
    """Check for no error."""


def _keeper(members: Sequence[int]) -> int | None:
    return list(members).index(0) if 0 in members and not launcher_keeps_store() else None


_clients: weakref.WeakKeyDictionary[Store, Store] = weakref.WeakKeyDictionary()
"""This process's own connection to the store of a default group, which ends with that group."""


def _client() -> Store:
    whole = distributed_c10d._get_default_store()
    client = _clients.get(whole) or _own_client(whole)
    if client is not whole:
        _clients[whole] = client
    return client


def _own_client(store: Store) -> Store:
    """Open a connection of our own: a thread that waits on the group's connection would block ours."""
    try:
        own: Store = store.clone()  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # an older PyTorch, or another kind of store
        logger.debug("the group's store is used as it is: %s", error)
        return store
    return own


class Waiter:
    """Run blocking calls one after another on a thread of its own; gloo's own timeouts would break its connections.

    check: called during each wait; raises to give it up. The thread then stays in its blocking call.
    told: returns the error to raise for a RuntimeError of a blocking call.
    """

    def __init__(self, check: Callable[[], None], told: Callable[[RuntimeError], BaseException] | None = None) -> None:
        self._check, self._told = check, told
        self._tasks: SimpleQueue[tuple[Callable[[], object], threading.Event, list[BaseException]] | None]
        self._tasks = SimpleQueue()
        self._thread: threading.Thread | None = None

    def wait(self, blocking: Callable[[], object]) -> None:
        """Return when `blocking` has; raise what it raises, or what `told` makes of that."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dfa_megatron waiter", daemon=True)
            self._thread.start()
        done, errors = threading.Event(), list[BaseException]()
        self._tasks.put((blocking, done, errors))
        while not done.wait(LOOKS):
            self._check()
        for error in errors:
            self._check()
            told = self._told(error) if self._told is not None and isinstance(error, RuntimeError) else error
            raise told from (error if told is not error else None)

    def stop(self) -> None:
        """End the thread, unless it is inside a blocking call."""
        self._told = None  # it may refer to who owns this
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            blocking, done, errors = task
            try:
                blocking()
            except BaseException as error:  # noqa: BLE001 -- the thread that asked raises it
                errors.append(error)
            # The caller frees what was waited for: freed here, in a thread that outlives the interpreter, it aborts.
            del task, blocking, errors
            done.set()


def bounded(
    action: Callable[[], T],
    seconds: float,
    check: Callable[[], None] = nothing,
    overdue: Callable[[], Exception] = TimeoutError,
) -> T:
    """Return the result of an action that may block for ever, or raise `overdue()` after some seconds.

    A thread that is still blocked then stays so. check: called during the wait; raises to give it up.
    """
    deadline, found = time.monotonic() + seconds, list[T]()

    def look() -> None:
        check()
        if time.monotonic() > deadline:
            raise overdue()

    waiter = Waiter(look)
    try:
        waiter.wait(lambda: found.append(action()))
    finally:
        waiter.stop()
    return found[0]
