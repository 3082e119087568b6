"""A channel: what one process group needs to run distributed attention, made once per group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import _StopRecomputationError

from dfa_megatron.errors import AbsentError, DistAttentionError, LostGroupError, UnsupportedError
from dfa_megatron.kernels.merge import fill_if
from dfa_megatron.kernels.tape import unrecorded
from dfa_megatron.runtime.agreement.calls import BACKWARD_ENDS, Calls, Facts, Kind, current_layer, different
from dfa_megatron.runtime.agreement.store import GroupStore, Waiter, bounded
from dfa_megatron.runtime.agreement.watch import Watched, watch
from dfa_megatron.runtime.comm.transports import Communicator, Transports
from dfa_megatron.runtime.environment import has_ended, has_one_queue, host, links, process, slowest

if TYPE_CHECKING:
    from dfa_megatron.runtime.prepare import Prepared

_CLOSING = 10.0
"""Seconds that a thread waits while another one closes the channel."""
_CPU = torch.device("cpu")
_DIGEST, _CALL = 32, struct.Struct("<QQ")
"""Bytes of a digest, and the number and the chain of a call."""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Channel:
    """Own connections of a group: messages never queue behind another library's collectives. To make one is collective.

    Args:
        group: the ranks.
        timeout: the group's own. A rank that does not come to agree is waited for a quarter of it.
        verify: watch the group.

    Attributes:
        group: a weak reference. rank, size: of this process in the group, and of the group.
        hosts: number of machines that the ranks are on.
        links: the slowest links among them. one_queue: whether any of them has one hardware queue for all streams.
        wait: runs a blocking call, such as a wait for messages between CPUs. Raises an AbsentError if a connection
            broke, and an error that another rank or the watch has found meanwhile.
        closed: whether the group was destroyed; then all else is gone.
        prepared: attentions that the ranks have agreed on. agreed: exchanges of other kinds. Last used, last in them.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, *, verify: bool = True) -> None:
        if (members := dist.get_process_group_ranks(group)) != sorted(members):
            what, why = f"a process group of global ranks {members}", "its communicators would sort them"
            raise UnsupportedError(what, why, "a group whose ranks ascend, as torch.distributed makes them by default")
        mine = {"host": host(), **process(), **links()._asdict(), "one queue": str(has_one_queue())}
        mine["verify"] = "on" if verify else "off"
        store, notes = GroupStore.of_group(group, json.dumps(mine), timeout.total_seconds() / 4)
        everyone = [json.loads(text) for text in notes]
        self.store, self.group, self.timeout = store, weakref.ref(group), timeout
        self.rank, self.size = store.rank, store.size
        self.calls = Calls()
        self.transports, self._made = Transports(self), dict[torch.device, Communicator]()
        self._waiter = Waiter(self.calls.check, self.broken)
        self.wait = self._waiter.wait
        self._watched: Watched | None = None
        self._flags: dict[torch.device, tuple[torch.Tensor, torch.cuda.Stream]] = {}
        self._closing, self.closed = threading.Lock(), False
        self._backward, self.on_cpu = -1, True
        self._devices: list[torch.device] = []
        self.agreed: OrderedDict[tuple[tuple[str, str], ...], None] = OrderedDict()
        self.prepared: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()
        if len({facts["verify"] for facts in everyone}) > 1:
            raise different([{"request.verify": facts["verify"]} for facts in everyone])
        self.hosts, self.links = len({facts["host"] for facts in everyone}), slowest(everyone)
        self.one_queue = any(facts["one queue"] == "True" for facts in everyone)
        self._processes = [(facts["space"], int(facts["pid"])) for facts in everyone]
        if verify:
            self.watch()

    def alive(self) -> bool:
        """Return whether the group has not been destroyed."""
        return self.group() in distributed_c10d._world.pg_map

    @property
    def verified(self) -> bool:
        """Whether the ranks watch over each other, and compare what is new."""
        return self._watched is not None

    def exchange(self, facts: Facts) -> list[Facts]:
        """Return every rank's facts, by rank; collective. An absent rank loses the group."""
        mine = json.dumps(facts).encode()
        with self.collective():
            sizes = [int.from_bytes(size) for size in self._meet(len(mine).to_bytes(8))]
            return [json.loads(text) for text in self._meet(mine.ljust(max(sizes)))]

    def agree(self, facts: Facts, beside: bytes = b"") -> list[bytes]:
        """Compare facts with those of the other ranks; collective. A fact "error" fails every rank.

        Returns the 32 bytes that every rank has brought beside them, by rank. Facts that differ raise a
        DisagreementError, which does not lose the group. A rank that does not come does, by an AbsentError.
        """
        # Facts are almost always equal. Then only a digest of each rank's has travelled.
        digests = _digest(json.dumps(facts, sort_keys=True)) + beside.ljust(_DIGEST)
        with self.collective():
            notes = self._meet(digests)
            if len({theirs[:_DIGEST] for theirs in notes}) > 1 or "error" in facts:
                raise different(self.exchange(facts))
        return [theirs[_DIGEST:] for theirs in notes]

    def watch(self) -> None:
        """Watch the group from now on."""
        seconds = self.timeout.total_seconds()
        self._watched = Watched(self.store, self.calls, self.alive, self.close, self._gone, self.unblock, seconds)
        watch(self._watched, dist.get_rank(), dist.get_world_size())
        self.calls.when_lost = self._watched.wake

    def _gone(self, rank: int) -> bool:
        """Return whether a rank's process is known to have ended; others' machines are not visible from here."""
        space, pid = self._processes[rank]
        return space == self._processes[self.rank][0] and has_ended(pid)

    def unblock(self, all_know: bool) -> bool:
        """Have the device go on that waits for a lost rank; what calls return from now on is NaN. For the watch.

        all_know: every other rank does so by now, and takes nothing amiss that comes from here.

        Returns whether something of this process still waits.
        """
        self._raise_flags()
        waits = not all_know or bool(self.calls.doing)
        if all_know:
            for made in list(self._made.values()):
                made.abort()
            waits |= self.transports.release()
        return waits

    def spoiled(self, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results of a call, NaN if the group is lost by the time the device has them.

        Once nothing waits for a lost rank any more, calls that were issued before come to an end with whatever lies in
        memory. So a look at a flag is queued behind what computes them; it takes microseconds.
        """
        if (device := results[0].device).type == "cuda" and self._watched is not None:
            if device not in self._flags:
                with unrecorded(), torch.inference_mode(False):  # it outlives the call
                    flag = torch.zeros((), dtype=torch.int32, device=device)
                    self._flags[device] = flag, torch.cuda.Stream(device)
                if self.calls.lost is not None:
                    self._raise_flags()
            fill_if(self._flags[device][0], results)
        return results

    def _raise_flags(self) -> None:
        """Raise the flags that spoil results, each on a stream that waits for nothing; any thread may."""
        for flag, stream in list(self._flags.values()):
            with torch.cuda.stream(stream):
                flag.fill_(1)
            stream.synchronize()

    def running(
        self, kind: Kind, device: torch.device, *, ends: bool = False, layer: int | None = None
    ) -> AbstractContextManager[None]:
        """Count each call inside, on tensors of that device; on a CPU, compare it with the others' at once.

        ends: it is part of a backward, whose end is counted, too. layer: to which it belongs; None: the current one.
        """
        return _Counted(self, kind, layer, on_cpu=device.type == "cpu", ends=ends)

    def _meet(self, note: bytes = bytes(2 * _DIGEST)) -> list[bytes]:
        """Return every rank's note, all of one length; if ranks are in different calls, the group is lost."""
        last = self.calls.last
        mine = torch.frombuffer(bytearray(_CALL.pack(last.number, last.chain) + note), dtype=torch.uint8)
        found = (self._made.get(_CPU) or self.communicator(_CPU)).gather(mine)
        theirs = [x.numpy().tobytes() for x in found]
        if self._watched is not None and len({each[: _CALL.size] for each in theirs}) > 1:
            error = self._watched.difference()
            self.calls.fail(error)
            raise error
        return [each[_CALL.size :] for each in theirs]

    def broken(self, error: RuntimeError) -> DistAttentionError:
        """Return the error to raise if a connection broke; it names the rank that has ended, if that is known."""
        if isinstance(error, DistAttentionError):
            return error
        if not self.alive():
            return LostGroupError(
                f"its process group was destroyed on this rank or another, which waited in it ({error})"
            )
        who = self._watched.broken() if self._watched is not None else ""
        return AbsentError(f"{who or 'a connection to another rank broke'} ({error})")

    def _end_of_backward(self) -> None:
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
    def collective(self) -> Iterator[None]:
        """Around steps that every rank takes: an error of this rank alone loses the group, for the others wait in them.

        An error of this package is theirs, too, unless a rank is absent.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, AbsentError) or not isinstance(error, DistAttentionError):
                self.calls.lose(error, told=True)
            raise

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor of this shape and dtype, by rank; collective."""
        found = self.communicator(x.device).gather(x.contiguous())
        self.spoiled(*found)
        return found

    def place(self, device: torch.device) -> str:
        """Return what ranks compare of a device: its type, and its number if this process has used others of it."""
        if device not in self._devices:
            self._devices.append(device)
        number = [other for other in self._devices if other.type == device.type].index(device)
        return device.type if number == 0 else f"{device.type}, device {number + 1} of this process"

    def communicator(self, device: torch.device) -> Communicator:
        """Return the connections for tensors on that device, or lose the group; the first call is collective."""
        if (known := self._made.get(device)) is not None:
            return known
        self.calls.check()
        self.calls.on_device(device)
        seconds = self.timeout.total_seconds() + _CLOSING
        make = functools.partial(Communicator, self, device)
        overdue = AbsentError(f"connections between the ranks of the group did not open within {seconds:.0f} s")
        with self.collective(), self.calls.waiting("opens connections"):
            try:
                made = bounded(make, seconds, self.calls.check, lambda: overdue)
            except dist.DistError as error:
                raise self.broken(error) from error
            except RuntimeError as error:
                if isinstance(error, DistAttentionError) or device.type != "cpu":
                    raise
                instead = "if all of them live, set GLOO_SOCKET_IFNAME to their network interface"
                raise AbsentError(f"gloo does not connect this rank to the others: {instead} ({error})") from error
        return self._made.setdefault(device, made)

    def close(self) -> None:
        """Stop the threads and let go of the connections, once; another thread that closes meanwhile waits."""
        if not self._closing.acquire(timeout=_CLOSING):
            return
        try:
            if self.closed:
                return
            abort = self.calls.lost is not None
            if self._watched is not None:
                self._watched.leave()
            self.prepared.clear()
            # A backward that is still to come would open connections of its own, and wait on them for the others.
            self.calls.lose(LostGroupError("its process group was destroyed since its forward"), told=False)
            self._waiter.stop()
            self.transports.clear()
            for made in self._made.values():
                made.close(abort=abort)
            # It refers to the channel itself, whose connections would wait for the garbage collector.
            self._watched = None
            self._made.clear()
        finally:
            self.closed = True
            self._closing.release()


class _Counted:
    """Around calls of a kind: a class, because a generator costs the host twice the time."""

    __slots__ = ("_channel", "_ends", "_kind", "_layer", "_on_cpu")

    def __init__(self, channel: Channel, kind: Kind, layer: int | None, *, on_cpu: bool, ends: bool) -> None:
        self._channel, self._kind, self._layer, self._on_cpu, self._ends = channel, kind, layer, on_cpu, ends

    def __enter__(self) -> None:
        channel = self._channel
        channel.on_cpu = self._on_cpu
        channel.calls.begin(self._kind, current_layer() if self._layer is None else self._layer)
        if self._on_cpu:
            try:
                channel._meet()
            except BaseException as error:
                channel.calls.fail(error)
                raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._channel.calls.fail(error)
            return
        self._channel.calls.end()
        if self._ends:
            self._channel._end_of_backward()


def refuse(error: Exception, over: Channel | None, since: int = -1) -> None:
    """Tell the other ranks that this one refuses; they hear it when they compare their requests, or their calls.

    since: the number of calls before what failed. Of an error in a later one the others have heard, unless it came
    between calls: then it loses the group, as one in a kernel does.
    """
    if over is None or not over.verified or over.calls.lost is not None or isinstance(error, _StopRecomputationError):
        return
    if since in (-1, over.calls.last.number):
        with over.calls.preparing():
            tell(error, over)
    elif not isinstance(error, DistAttentionError) and not over.calls.refused:
        over.calls.lose(error, told=True)


def tell(error: Exception, over: Channel) -> None:
    """Compare an error in place of facts: all ranks then end with it. Within `preparing`."""
    text = str(error) if isinstance(error, DistAttentionError) else f"{type(error).__name__}: {error}"
    over.calls.refuse(text)
    with contextlib.suppress(DistAttentionError):  # this rank's own reason is the clearer one
        over.agree({"error": text})
