"""A channel: what one process group needs to run distributed attention, made once per group."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.errors import AbsentError, DistAttentionError, UnsupportedError
from dfa_megatron.runtime.agreement.agree import Facts, agree, exchange
from dfa_megatron.runtime.agreement.board import Board
from dfa_megatron.runtime.agreement.calls import BACKWARD_ENDS, Calls, Kind, current_layer
from dfa_megatron.runtime.agreement.process import has_ended, host, process
from dfa_megatron.runtime.agreement.waiter import Waiter
from dfa_megatron.runtime.agreement.watcher import Watch
from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.copy_engine import open_transport
from dfa_megatron.runtime.comm.gloo import GlooTransport
from dfa_megatron.runtime.comm.groups import before_destroying, is_known, resolve, timeout_of
from dfa_megatron.runtime.comm.nccl import NcclTransport
from dfa_megatron.runtime.comm.transport import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)
"""How long a group waits for its ranks where its backend does not tell: PyTorch's default."""

_PAUSE = 0.1
"""Seconds at the end of a process, for the threads of gloo groups that others keep, as DeepSpeed does."""


@dataclass(frozen=True, slots=True)
class Guard:
    """How the calls of a group are looked after: the options of these names.

    verify: compare every call, and have a watcher. agreement_timeout, stall_timeout: seconds.
    """

    verify: bool = True
    agreement_timeout: float = 120.0
    stall_timeout: float = 1800.0

    @classmethod
    def of(cls, verify: object, agreement_timeout: object, stall_timeout: object) -> Guard:
        """From options that nobody has checked yet: whoever refuses one has to tell the other ranks in some time."""
        patience = _time(agreement_timeout, _DEFAULT.agreement_timeout)
        stall = 0.0 if stall_timeout == 0 else _time(stall_timeout, _DEFAULT.stall_timeout)
        return cls(verify != "off", patience, stall)


_DEFAULT = Guard()


def _time(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else default


class Channel:
    """Own communicators of a group: messages never queue behind another library's collectives.

    Attributes:
        rank, size: of this process in the group, and of the group.
        hosts: how many machines they are on.
        board, calls: what the ranks tell each other, and what this one has run. Parts share the calls of the whole.
    """

    def __init__(
        self,
        board: Board,
        timeout: timedelta | None,
        guard: Guard,
        alive: Callable[[], bool],
        whole: Channel | None = None,
    ) -> None:
        """Meet the other ranks; collective.

        Args:
            board: of the ranks.
            timeout: of the communicators, as the group's own; None is the backend's default.
            guard: see `Guard`.
            alive: whether the group still exists.
            whole: the channel that this one is a part of.
        """
        if list(board.members) != sorted(board.members):
            raise UnsupportedError(
                f"a process group of global ranks {list(board.members)}",
                "its communicators would number them in ascending order",
                "a group whose ranks ascend, as torch.distributed makes them by default",
            )
        self.board, self.rank, self.size, self.guard = board, board.rank, board.size, guard
        self.calls: Calls = Calls() if whole is None else whole.calls
        self._alive, self._timeout, self._made = alive, timeout, list[Communicator]()
        self._waiter = Waiter(self.calls.check)
        self._watch: Watch | None = None if whole is None else whole._watch
        self._collectives: dict[str, Communicator] = {}
        self._transports: dict[tuple[str, str], Transport] = {}
        self._subgroups: dict[tuple[int, ...], Channel] = {}
        self._backward, self.on_cpu, self._name = -1, True, ""
        board.interrupted = self.calls.check
        everyone = self.exchange({"host": host(), **process()}, "make contact for the first time")
        self.hosts = len({facts["host"] for facts in everyone})
        self._processes = [(facts["space"], int(facts["pid"])) for facts in everyone]
        self.look_after(guard)

    def exchange(self, facts: Facts, subject: str) -> list[Facts]:
        """Every rank's facts, by rank; collective.

        Raises:
            AbsentError: a rank did not come; the group is lost.
        """
        return self._together(lambda: exchange(facts, self.board, self.guard.agreement_timeout, subject))

    def agree(self, facts: Facts) -> None:
        """Compare facts with those of the other ranks; collective.

        Raises:
            AbsentError: a rank did not come; the group is lost.
            DisagreementError: they differ, or a rank has sent an error; the group is not lost.
        """
        self._together(lambda: agree(facts, self.board, self.guard.agreement_timeout))

    def _together(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except AbsentError as error:
            self.calls.lose(error, told=True)
            raise

    def look_after(self, guard: Guard) -> None:
        """Take these options for what comes; the first that ask for it start the watcher."""
        self.guard = guard
        patience = (self._timeout or _PATIENCE).total_seconds()
        if self._watch is None and guard.verify:
            self._watch = Watch(self.board, self.calls, self._alive, self._gone, guard.stall_timeout, patience)
            self._watch.start()
        elif self._watch is not None:
            self._watch.stall = guard.stall_timeout

    def _gone(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended: of ranks whose processes can be seen from here."""
        space, pid = self._processes[rank]
        return space == self._processes[self.rank][0] and has_ended(pid)

    def running(self, kind: Kind, device: torch.device) -> AbstractContextManager[None]:
        """Around one call, on tensors of that device: count it, and compare it with the others' where that is cheap."""
        self.on_cpu = device.type == "cpu"
        return _Running(self, kind)

    def _meet(self) -> None:
        """Compare the call that has just begun with the others' at once: for messages that the host waits for.

        Raises:
            DisagreementError: ranks run different calls; the message is a table.
            AbsentError: a rank has ended, or does not come.
        """
        last = self.calls.last
        mine = torch.tensor([last.number, last.chain])
        theirs, work = self.collectives(mine.device).gather(mine)
        self.wait(work.wait)
        if self._watch is not None and any(not torch.equal(x, mine) for x in theirs):
            raise self._watch.difference()

    def wait(self, blocking: Callable[[], object]) -> None:
        """Wait for messages between CPUs.

        Raises:
            AbsentError: a connection broke; says which rank has ended, where that is known.
            DistAttentionError: what another rank or the watcher has found meanwhile.
        """
        try:
            self._waiter.wait(blocking)
        except RuntimeError as error:
            if isinstance(error, DistAttentionError):
                raise
            suspects = self._watch.suspects() if self._watch is not None else ""
            raise AbsentError(f"{suspects or 'a connection to another rank broke'} ({error})") from error

    def end_of_backward(self) -> None:
        """Count the end of this backward as a call, once: ranks that ran another number of them differ in it."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        with self.calls.waiting("is at the end of a backward"):
            self.calls.add(BACKWARD_ENDS)
            if self.on_cpu:
                self._meet()

    def close(self) -> None:
        """Let go of the connections, and stop what looks after the group."""
        for subgroup in self._subgroups.values():
            subgroup.close()
        if self._watch is not None:
            self._watch.stop()
        self._waiter.stop()
        self._transports.clear()
        self._collectives.clear()
        for made in self._made:
            made.close(abort=self.calls.lost is not None)
        self._made.clear()

    def transport(self, device: torch.device, kind: str = "auto") -> Transport:
        """What moves messages of tensors on that kind of device: "p2p", "copy_engine", or "auto" for the better one.

        The first call is collective. It comes after the ranks have agreed: a rank whose tensors are elsewhere is
        told so instead of being waited for.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and cannot serve these ranks.
        """
        known = self._transports.get((device.type, kind))
        if known is None:
            known = self._transports[device.type, kind] = self._open(device, kind)
            if device.type == "cuda":
                self.calls.on_device()
        return known

    def _open(self, device: torch.device, kind: str) -> Transport:
        if kind == "auto":
            if device.type == "cpu":
                return self.transport(device, "p2p")
            try:
                _refuse_one_queue()
                return self.transport(device, "copy_engine")
            except UnsupportedError as error:
                logger.info("messages go point to point: the copy engines do not serve: %s", error.why)
                return self.transport(device, "p2p")
        if kind == "copy_engine":
            found = open_transport(self, device)
            if isinstance(found, str):
                raise UnsupportedError("transport='copy_engine'", found, "transport='p2p'")
            return found
        own = self._communicator(device)
        return GlooTransport(own, self.wait) if device.type == "cpu" else NcclTransport(own, device)

    def reserve(self, device: torch.device, kind: str, nbytes: int) -> None:
        """Make room for messages in the memory of that kind of transport; collective, as `transport` is.

        Where a GPU has no memory for them, "auto" is point to point from then on.

        Raises:
            UnsupportedError: "copy_engine" was asked for, and a GPU has no memory for it; on every rank.
        """
        try:
            self.transport(device, kind).reserve(nbytes)
        except UnsupportedError as error:
            if kind != "auto":
                raise
            logger.warning("messages go point to point from now on: %s", error.why)
            self._transports[device.type, kind] = self.transport(device, "p2p")

    def has_symmetric_memory(self, kind: str) -> bool:
        """That kind of transport has reserved memory that PyTorch's allocator knows nothing of."""
        known = self._transports.get(("cuda", kind))
        return known is not None and known.generation > 0

    def collectives(self, device: torch.device) -> Communicator:
        """Connections for collectives of tensors on that kind of device; the first call is itself collective."""
        if device.type not in self._collectives:
            self._collectives[device.type] = self._communicator(device)
        return self._collectives[device.type]

    def subgroup(self, ranks: Sequence[int]) -> Channel:
        """The channel of some of this channel's ranks, with this one among them; the first call is collective.

        Every rank of the whole must make the channels of its parts in the same order, after all have agreed.
        """
        key = tuple(ranks)
        if key not in self._subgroups:
            self._subgroups[key] = Channel(self.board.subgroup(key), self._timeout, self.guard, self._alive, self)
        return self._subgroups[key]

    def symmetric_name(self) -> str:
        """The name by which PyTorch's symmetric memory finds these ranks; the first call is collective."""
        if not self._name:
            self._name = self.exchange({"name": f"dfa_megatron {uuid.uuid4().hex}"}, "name the group")[0]["name"]
            self.collectives(torch.device("cpu")).give_name(self._name)
        return self._name

    def _communicator(self, device: torch.device) -> Communicator:
        with self.calls.waiting("opens connections"):
            self._made.append(Communicator(self.board, device, self._timeout))
        return self._made[-1]


class _Running:
    """Around one call: a class, for a generator costs the host twice the time."""

    __slots__ = ("_kind", "_over")

    def __init__(self, over: Channel, kind: Kind) -> None:
        self._over, self._kind = over, kind

    def __enter__(self) -> None:
        over = self._over
        over.calls.begin(self._kind, current_layer())
        if over.on_cpu:
            try:
                over._meet()
            except BaseException as error:
                over.calls.fail(error)
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._over.calls.end()
        else:
            self._over.calls.fail(error)


_channels: dict[str, tuple[weakref.ref[dist.ProcessGroup], Channel]] = {}


def channel(name: str, guard: Guard | None = None) -> Channel:
    """The channel of a named group; the first call for a group must be made by all of its ranks.

    guard: how its calls are looked after from now on; None leaves that as it is.

    The communicators are made from the group's own ranks only, so other ranks need not take part, and every rank makes
    them in the order in which it first uses its groups.
    """
    group = resolve(name)
    known = _channels.get(name)
    if known is None or known[0]() is not group:
        _end_with_the_process()
        before_destroying(_close)
        reference = weakref.ref(group)
        guard = guard or Guard()
        board = Board.of_group(group, guard.agreement_timeout)
        made = Channel(board, timeout_of(group), guard, lambda: is_known(reference()))
        known = _channels[name] = (reference, made)
    elif guard is not None and guard != known[1].guard:
        known[1].look_after(guard)
    return known[1]


def renew(name: str) -> None:
    """Forget the channel of a group, so that the next attention makes a new one; every rank of it must do so.

    For whoever knows that no rank is inside of an attention: after an error that all ranks have met and survived.
    """
    if name in _channels:
        _channels.pop(name)[1].close()


def _close(group: dist.ProcessGroup | None) -> None:
    """A group is about to be destroyed, or all are."""
    for name in list(_channels) if group is None else [str(group.group_name)]:
        if name in _channels:
            _channels.pop(name)[1].close()


@functools.cache
def _end_with_the_process() -> None:
    atexit.register(_end)


def _end() -> None:
    """Stop the watchers, and let the threads of gloo groups that others keep, as DeepSpeed does, come to rest."""
    for _, known in _channels.values():
        known.close()
    time.sleep(_PAUSE)


def _refuse_one_queue() -> None:
    """A copy-engine stream waits for its peers in the queue that it shares with other streams.

    Raises:
        UnsupportedError: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron wants on Hopper, leaves one queue for all.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UnsupportedError(
            "transport='copy_engine' by itself",
            "with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels would queue up behind its waits, which has not been measured",
            "transport='copy_engine' by name",
        )
