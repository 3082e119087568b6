"""A channel: what one process group needs to run distributed attention, made once per group."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dfa_megatron.errors import AbsentError, DistAttentionError, LostGroupError, UnsupportedError
from dfa_megatron.runtime.agreement.agree import Facts, agree, exchange
from dfa_megatron.runtime.agreement.board import Board
from dfa_megatron.runtime.agreement.calls import BACKWARD_ENDS, Calls, Kind, current_layer
from dfa_megatron.runtime.agreement.difference import Shown, read, written
from dfa_megatron.runtime.agreement.guard import Guard
from dfa_megatron.runtime.agreement.process import has_ended, host, process
from dfa_megatron.runtime.agreement.waiter import Waiter, bounded
from dfa_megatron.runtime.agreement.watcher import Watch
from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.transports import Transports
from dfa_megatron.runtime.environment import has_one_queue, links, slowest

T = TypeVar("T")

_PATIENCE = timedelta(minutes=30)
"""How long a group waits for its ranks where its backend does not tell: PyTorch's default."""

_CLOSING = 10.0
"""Seconds that a thread waits while another one closes the channel."""


class Channel:
    """Own connections of a group: messages never queue behind another library's collectives.

    Attributes:
        rank, size: of this process in the group, and of the group.
        hosts: number of machines that the ranks are on.
        links: the slowest links among them. one_queue: whether any of them has one hardware queue for all streams.
        board, calls: what the ranks tell each other, and what this one has run. Subgroups share the calls.
        transports: what moves messages between these ranks.
        wait: runs a blocking call, such as a wait for messages between CPUs. Raises an AbsentError where a connection
            broke, and an error that another rank or the watcher has found meanwhile.
        ended: called by the watcher once the group is destroyed; closes the channel.
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
            guard: how calls are compared and watched.
            alive: whether the group still exists.
            whole: the channel of which this is a subgroup.
        """
        if list(board.members) != sorted(board.members):
            raise UnsupportedError(
                f"a process group of global ranks {list(board.members)}",
                "its communicators would number them in ascending order",
                "a group whose ranks ascend, as torch.distributed makes them by default",
            )
        self.board, self.rank, self.size, self.guard = board, board.rank, board.size, guard
        self.calls: Calls = Calls() if whole is None else whole.calls
        self.transports, self.ended = Transports(self), self.close
        self._alive, self._timeout, self._made = alive, timeout, list[Communicator]()
        self._waiter = Waiter(self.calls.check, self._broken)
        self.wait = self._waiter.wait
        self._watch: Watch | None = None if whole is None else whole._watch
        self._collectives: dict[str, Communicator] = {}
        self._subgroups: dict[tuple[int, ...], Channel] = {}
        self._releases: list[Callable[[], object]] = []
        self._closing, self._closed = threading.Lock(), False
        self._backward, self.on_cpu, self._name = -1, True, ""
        self._devices: list[torch.device] = []
        board.interrupted = self.calls.check
        if whole is None:
            self.calls.when_lost = board.hold_store
        mine = {"host": host(), **process(), **links()._asdict(), "one queue": str(has_one_queue())}
        everyone = self.exchange(mine, "make contact for the first time")
        self.hosts, self.links = len({facts["host"] for facts in everyone}), slowest(everyone)
        self.one_queue = any(facts["one queue"] == "True" for facts in everyone)
        self._processes = [(facts["space"], int(facts["pid"])) for facts in everyone]
        self.look_after(guard)

    def exchange(self, facts: Facts, subject: str) -> list[Facts]:
        """Return every rank's facts, by rank; collective.

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
        """Take these options from now on; the first that ask for a watcher start it."""
        self.guard = guard
        patience = (self._timeout or _PATIENCE).total_seconds()
        if self._watch is None and guard.verify:
            stall, ended = guard.stall_timeout, lambda: self.ended()
            self._watch = Watch(self.board, self.calls, self._alive, ended, self._gone, stall, patience)
            self._watch.start()
        elif self._watch is not None:
            self._watch.stall = guard.stall_timeout

    def _gone(self, rank: int) -> bool:
        """Return whether a rank's process is known to have ended; only processes visible from here can be known."""
        space, pid = self._processes[rank]
        return space == self._processes[self.rank][0] and has_ended(pid)

    def running(self, kind: Kind, device: torch.device) -> AbstractContextManager[None]:
        """Count each call inside, on tensors of that device, and compare it with the others' where that is cheap."""
        return _Running(self, kind, on_cpu=device.type == "cpu")

    def _meet(self) -> None:
        """Compare the call that has just begun with the others' at once, where the host waits for messages anyway.

        Raises:
            DisagreementError: ranks run different calls; the message is a table.
            AbsentError: a rank has ended, or does not come.
        """
        last = self.calls.last
        mine = torch.tensor([last.number, last.chain], device="cpu")
        theirs, work = (self._collectives.get("cpu") or self.collectives(mine.device)).gather(mine)
        self.wait(work.wait)
        for found in theirs:
            if self._watch is not None and not torch.equal(found, mine):
                everyone: list[Shown] = []
                with contextlib.suppress(DistAttentionError):  # a rank has ended meanwhile, and may have left a note
                    everyone = self._shown()
                raise self._watch.difference(everyone)

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        theirs, work = self.collectives(mine.device).gather(mine)
        self.wait(work.wait)
        return theirs

    def _shown(self) -> list[Shown]:
        """Return what each rank shows of its last calls, past the store, which may end with a rank's process.

        Collective: every rank has seen the same differences, so each of them comes here.
        """
        text = written(self.calls).encode()
        size = max(int(theirs) for theirs in self._gathered(torch.tensor(len(text), device="cpu")))
        mine = torch.tensor(list(text.ljust(size)), dtype=torch.uint8, device="cpu")
        return [read(bytes(theirs.tolist()).decode()) for theirs in self._gathered(mine)]

    def _broken(self, error: RuntimeError) -> DistAttentionError:
        """Return the error to raise where a connection broke; it names the rank that has ended, where that is known."""
        if isinstance(error, DistAttentionError):
            return error
        suspects = self._watch.suspects() if self._watch is not None else ""
        return AbsentError(f"{suspects or 'a connection to another rank broke'} ({error})")

    def end_of_backward(self) -> None:
        """Count the end of this backward as a call, once: ranks with another number of backwards differ in it."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        with self.calls.waiting("is at the end of a backward"):
            self.calls.add(BACKWARD_ENDS)
            if self.on_cpu:
                self._meet()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around steps that every rank takes once all have agreed: an error of this rank alone loses the group.

        The others wait for it inside of the same steps. An error of this package is theirs, too, or has lost it.
        """
        try:
            yield
        except DistAttentionError:
            raise
        except BaseException as error:
            self.calls.lose(error, told=True)
            raise

    def collectives(self, device: torch.device) -> Communicator:
        """Return connections for collectives of tensors on that device; the first call is collective."""
        place = str(device)
        if place not in self._collectives:
            self._collectives[place] = self.new_communicator(device)
        return self._collectives[place]

    def place(self, device: torch.device) -> str:
        """Return what ranks compare of a device: its type, and its number if this process has used others of it."""
        if device not in self._devices:
            self._devices.append(device)
        number = [other for other in self._devices if other.type == device.type].index(device)
        return device.type if number == 0 else f"{device.type}, device {number + 1} of this process"

    def new_communicator(self, device: torch.device) -> Communicator:
        """Open connections that end with this channel; collective.

        Raises:
            AbsentError: a rank has ended, or does not come.
            LostGroupError: another rank failed to open them.
        """
        self.calls.check()
        seconds = (self._timeout or _PATIENCE).total_seconds() + _CLOSING

        def make() -> Communicator:
            return Communicator(self.board, device, self._timeout, self._broken)

        def overdue() -> AbsentError:
            return AbsentError(f"connections between the ranks of the group did not open within {seconds:.0f} s")

        with self.together(), self.calls.waiting("opens connections"):
            try:
                self._made.append(bounded(make, seconds, self.calls.check, overdue))
            except dist.DistError as error:
                raise self._broken(error) from error
        return self._made[-1]

    def subgroup(self, ranks: Sequence[int]) -> Channel:
        """Return the channel of some of this channel's ranks, this one among them; the first call is collective.

        After all ranks have agreed, every one of them must make its subgroups in the same order.
        """
        key = tuple(ranks)
        if key not in self._subgroups:
            self._subgroups[key] = Channel(self.board.subgroup(key), self._timeout, self.guard, self._alive, self)
        return self._subgroups[key]

    def symmetric_name(self) -> str:
        """Return the name by which PyTorch's symmetric memory finds these ranks; the first call is collective."""
        if not self._name:
            self._name = self.exchange({"name": f"dfa_megatron {uuid.uuid4().hex}"}, "name the group")[0]["name"]
            self.collectives(torch.device("cpu")).give_name(self._name)
        return self._name

    def before_closing(self, release: Callable[[], object]) -> None:
        """Have `release` called before the connections go: for plans over them and CUDA graphs with their messages."""
        self._releases.append(release)

    def close(self) -> None:
        """Stop the threads and let go of the connections, once; another thread that closes meanwhile waits."""
        if not self._closing.acquire(timeout=_CLOSING):
            return
        try:
            if not self._closed:
                abort = self.calls.lost is not None
                self._release()
                # A backward that is still to come would open connections of its own, and wait on them for the others.
                self.calls.lose(LostGroupError("its process group was destroyed since its forward"), told=False)
                self._close(abort)
        finally:
            self._closing.release()

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for release in self._releases:
            release()
        for subgroup in self._subgroups.values():
            subgroup._release()

    def _close(self, abort: bool) -> None:
        self._closed = True
        for subgroup in self._subgroups.values():
            subgroup._close(abort)
        self._waiter.stop()
        self.transports.clear()
        self._collectives.clear()
        for made in self._made:
            made.close(abort=abort)
        self._made.clear()
        # References to the channel itself: its store's connection would wait for the garbage collector.
        self._watch, self.ended = None, _nothing
        self._releases.clear()
        self._subgroups.clear()


def _nothing() -> None:
    """The default of `Channel.ended` once it is closed."""


class _Running:
    """Around calls of a kind: a class, because a generator costs the host twice the time."""

    __slots__ = ("_channel", "_kind", "_on_cpu")

    def __init__(self, channel: Channel, kind: Kind, *, on_cpu: bool) -> None:
        self._channel, self._kind, self._on_cpu = channel, kind, on_cpu

    def __enter__(self) -> None:
        channel = self._channel
        channel.on_cpu = self._on_cpu
        channel.calls.begin(self._kind, current_layer())
        if self._on_cpu:
            try:
                channel._meet()
            except BaseException as error:
                channel.calls.fail(error)
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._channel.calls.end()
        else:
            self._channel.calls.fail(error)
