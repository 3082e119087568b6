"""The board of a group: short notes from rank to rank, in the store through which the group was made."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from dfa_megatron.errors import AbsentError, DistAttentionError
from dfa_megatron.runtime.agreement.waiter import bounded
from dfa_megatron.runtime.environment import launcher_keeps_store

logger = logging.getLogger(__name__)

_MARGIN = 1.0
"""Seconds beyond its timeout that a round may take where the store answers slowly."""
_SHORTEST, _LONGEST = 2e-4, 2e-2
"""Seconds between two looks at the board: short at first, when ranks tend to arrive together, then longer."""


def _nothing_lost() -> None:
    """The default of `Board.interrupted`."""


def _nothing_kept() -> None:
    """The store of a board that is of no whole group."""


class Board:
    """Notes of the ranks of one group.

    A round never blocks in the store, so every waiting rank knows which ranks are missing. The store itself stops
    answering if the process that keeps it does.

    Args:
        store: shared by the ranks of the group, and used by nothing else under this prefix.
        rank: of this process in the group.
        members: global ranks, in the order of the group.

    Attributes:
        interrupted: called while this rank waits; raises once there is nothing to wait for.
        keeper: the rank whose process keeps the store, if another rank of the group does.
        keeps: whether this process keeps the store, which ends with it.
    """

    def __init__(self, store: Store, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self.size = len(self.members)
        self.interrupted: Callable[[], None] = _nothing_lost
        self.keeper = _keeper(self.members, rank)
        self.keeps = self.members[rank] == 0 and not launcher_keeps_store()
        # A group may reuse the name of a destroyed one, whose notes must not be read as new.
        self._store = PrefixStore(f"life {store.add(f'lives of {rank}', 1)}", store)
        self._round = self._stores = 0
        self._of_group: Callable[[], Store | None] = _nothing_kept
        self._held: Store | None = None

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, timeout: float = 120.0) -> Board:
        """Make the board of a process group; no rank waits for another.

        Raises:
            AbsentError: the store did not answer within that many seconds.
        """
        members, rank = dist.get_process_group_ranks(group), group.rank()
        whole, known = distributed_c10d._world.pg_map[group][1], weakref.ref(group)

        def make() -> Board:
            made = cls(PrefixStore("dfa_megatron", _own_client(whole)), rank, members)
            made._of_group = lambda: _store_of(known())
            return made

        keeper, started = _keeper(members, rank), time.monotonic()
        try:
            return bounded(make, timeout, _nothing_lost, lambda: _no_answer(members, keeper, timeout))
        except RuntimeError as error:
            raise _store_gone(members, keeper, "find the board", time.monotonic() - started, error) from error

    def hold_store(self) -> None:
        """Keep the store of the group, if this process does, for as long as this board: others still read from it.

        A group that goes on without an error takes its store with it, so that a new one may have its name and port.
        """
        if self.keeps:
            self._held = self._of_group()

    def fresh_store(self) -> Store:
        """Return a store that these ranks share for one purpose; all ranks must ask in the same order."""
        self._stores += 1
        return PrefixStore(f"store {self._stores}", self._store)

    def subgroup(self, ranks: Sequence[int]) -> Board:
        """Return the board of some of this board's ranks, this one among them; `ranks` count on this board."""
        store = PrefixStore("part " + " ".join(map(str, ranks)), self._store)
        made = Board(store, list(ranks).index(self.rank), [self.members[rank] for rank in ranks])
        made.interrupted = self.interrupted
        return made

    def put(self, key: str, note: str) -> None:
        """Leave this rank's note under a key; a later one replaces it."""
        self._store.set(f"{key}/{self.rank}", note)

    def has(self, key: str, rank: int) -> bool:
        """Whether a rank has left a note under a key."""
        return bool(self._store.check([f"{key}/{rank}"]))

    def read(self, key: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Return the notes of some ranks, by default of all; each must have left one."""
        asked = range(self.size) if ranks is None else ranks
        return [note.decode() for note in self._store.multi_get([f"{key}/{rank}" for rank in asked])]

    def collect(self, note: str, timeout: float, subject: str) -> list[str]:
        """Leave a note and return every rank's, by rank; collective.

        Args:
            note: of this rank.
            timeout: seconds to wait for the others.
            subject: of the round, as errors name it: an infinitive.

        Raises:
            AbsentError: names the ranks that did not come in time.
        """
        key, self._round = f"round {self._round}", self._round + 1
        given_up: list[bool] = []

        def meet() -> list[str]:
            started = time.monotonic()
            try:
                self.put(key, note)
                self._await(key, timeout, subject, given_up)
                return self._taken(key)
            except DistAttentionError:
                raise
            except RuntimeError as error:  # the process that keeps the store has ended
                raise _store_gone(self.members, self.keeper, subject, time.monotonic() - started, error) from error

        try:
            overdue = timeout + _MARGIN
            return bounded(meet, overdue, self.interrupted, lambda: _no_answer(self.members, self.keeper, overdue))
        finally:
            given_up.append(True)

    def _await(self, key: str, timeout: float, subject: str, given_up: Sequence[bool]) -> None:
        everyone = [f"{key}/{rank}" for rank in range(self.size)]
        started, pause = time.monotonic(), _SHORTEST
        while not given_up and not self._store.check(everyone):
            if time.monotonic() - started > timeout:
                if missing := [rank for rank in range(self.size) if not self.has(key, rank)]:
                    raise AbsentError(_absent(self, missing, timeout, subject))
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _taken(self, key: str) -> list[str]:
        notes = self.read(key)
        if self._round > 2:  # a rank's note of the last round shows that it has read the round before
            self._store.delete_key(f"round {self._round - 3}/{self.rank}")
        return notes


def _store_of(group: dist.ProcessGroup | None) -> Store | None:
    known = distributed_c10d._world.pg_map
    return known[group][1] if group is not None and group in known else None


def _store_gone(
    members: Sequence[int], keeper: int | None, subject: str, seconds: float, error: RuntimeError
) -> AbsentError:
    who = f"{named(members, [keeper])}, which kept it," if keeper is not None else "who kept it"
    return AbsentError(
        f"the store of the group is gone, after {seconds:.0f} s of coming together to {subject}: {who} has ended"
        f" ({error})"
    )


def _absent(board: Board, missing: Sequence[int], seconds: float, subject: str) -> str:
    return f"{named(board.members, missing)} did not come within {seconds:.0f} s to {subject}"


def _no_answer(members: Sequence[int], keeper: int | None, seconds: float) -> AbsentError:
    who = f"{named(members, [keeper])}, which keeps it," if keeper is not None else "the process that keeps it"
    return AbsentError(f"the store of the group does not answer within {seconds:.0f} s: {who} gives no sign of life")


def _keeper(members: Sequence[int], rank: int) -> int | None:
    """Return the other rank that keeps the store: global rank 0, if it is a member and the launcher does not."""
    if launcher_keeps_store() or 0 not in members or members[rank] == 0:
        return None
    return list(members).index(0)


def named(members: Sequence[int], ranks: Sequence[int]) -> str:
    """Return how errors name ranks of a group, with their global ranks where these differ."""
    if all(members[rank] == rank for rank in ranks):
        return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of the group"
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} of the group (global {listed([members[r] for r in ranks])})"


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text: all of them, or the first two and their number."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... ({len(ranks)} of them)"


def _own_client(store: Store) -> Store:
    """Open a connection of our own: a thread that waits on the group's connection would block ours."""
    try:
        own: Store = store.clone()  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # an older PyTorch, or another kind of store
        logger.debug("the group's store is used as it is: %s", error)
        return store
    return own
