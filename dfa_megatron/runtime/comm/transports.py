"""Own connections between the ranks of a group, messages over them, and which transport serves a channel.

Connections are gloo's for tensors on CPUs, NCCL's for tensors on GPUs. torch.distributed does not know them by name, so
a group may be made and destroyed at any time.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, StreamTransport, Transport

if TYPE_CHECKING:
    from dfa_megatron.runtime.comm.channel import Channel

logger = logging.getLogger(__name__)


class Communicator:
    """One set of connections of a channel, for tensors on a device; to make one is collective.

    A collective is over once a method returns; on a GPU the current stream waits for it, not the host. A connection
    that broke is an AbsentError. It names the rank that has ended: gloo and NCCL do not.
    """

    def __init__(self, over: Channel, device: torch.device) -> None:
        store, timeout = over.store, over.timeout
        self._store, self.device, self._broken, self.wait = store.fresh(), device, over.broken, over.wait
        self._key: Any = store.key  # of no other group of this process
        self._name: Any = ""
        self._aborted = False
        self._group = dist.ProcessGroup(self._store, store.rank, store.size)
        if device.type == "cpu":
            kind = dist.ProcessGroup.BackendType.GLOO
            self._backend: Any = dist.ProcessGroupGloo(self._store, store.rank, store.size, timeout=timeout)
        else:
            kind = dist.ProcessGroup.BackendType.NCCL
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout
            self._backend = dist.ProcessGroupNCCL(self._store, store.rank, store.size, options)
        self._group._register_backend(torch.device(device.type), kind, self._backend)
        if device.type != "cpu":
            # Connect all ranks now, because the first batch of a plan may leave some out.
            self._group.allreduce([torch.zeros(1, device=device)]).wait()
            logger.info("made a NCCL communicator of %d ranks for distributed attention", store.size)

    def post(self, sends: Sequence[Send], receives: Sequence[Recv]) -> list[dist.Work]:
        """Start a batch of messages: on NCCL's own stream after the current one, or in gloo's threads."""
        if not sends and not receives:
            return []
        together = self.device.type != "cpu"
        works = []
        try:
            if together:
                self._group._start_coalescing(self.device)
            for start, messages in ((self._group.recv, receives), (self._group.send, sends)):
                for message in messages:
                    for tag, x in enumerate(message.tensors):  # gloo tells the tensors of a message apart by their tags
                        works.append(start([x], message.peer, tag))
            return [self._group._end_coalescing(self.device)] if together else works
        except RuntimeError as error:
            raise self._named(error) from error

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor of this shape, by rank."""
        found = list(x.new_empty((self._group.size(), *x.shape)).unbind())
        self._run(self._group.allgather, [found], [x])
        return found

    def broadcast(self, x: torch.Tensor, rank: int) -> None:
        """Write that rank's tensor into every rank's."""
        self._run(self._group.broadcast, x, rank)

    def all_to_all(
        self, received: torch.Tensor, send: torch.Tensor, counts: list[int], sent: list[int] | None = None
    ) -> None:
        """Receive rows from the ranks in their order, counts[i] from rank i, and send it sent[i], or as many."""
        if self.device.type == "cpu":  # gloo does not know every dtype
            received, send = received.view(torch.uint8), send.view(torch.uint8)
        # Past PyTorch's dispatcher: the host's time until a message leaves is on a short call's critical path.
        self._run(self._backend.alltoall_base, received, send, counts, sent or counts, dist.AllToAllOptions())

    def _run(self, start: Callable[..., dist.Work], *given: object) -> None:
        try:
            work = start(*given)
        except RuntimeError as error:
            raise self._named(error) from error
        if self.device.type == "cpu":
            self.wait(work.wait)  # unless another rank fails
        else:
            work.wait()

    def _named(self, error: RuntimeError) -> RuntimeError | DistAttentionError:
        """Return the error to raise where messages do not start: of a broken connection, or the same."""
        # Gloo raises no type of its own. NCCL does, and other errors of a GPU stay what they are.
        return self._broken(error) if self.device.type == "cpu" or isinstance(error, dist.DistBackendError) else error

    def symmetric_name(self) -> Any:
        """Return the name by which PyTorch's symmetric memory finds these ranks; the first call is collective."""
        if not self._name:
            from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

            self._group._set_group_name(self._key)
            _register_process_group(self._key, self._group)
            _SymmetricMemory.set_group_info(self._key, self._group.rank(), self._group.size(), self._store)
            self._name = self._key
        return self._name

    def abort(self) -> None:
        """Give up the messages under way on a GPU, once; another thread may call this."""
        if self.device.type != "cpu" and not self._aborted:
            self._aborted = True
            with torch.cuda.device(self.device):
                self._backend.abort()

    def close(self, *, abort: bool) -> None:
        """Close the connections. abort: do not wait for messages under way."""
        if self._name:
            torch._C._distributed_c10d._unregister_process_group(self._name)
        if self.device.type != "cpu":
            if abort:
                self.abort()
            if not self._aborted:
                with torch.cuda.device(self.device):  # the thread that closes may not be the one that has computed
                    self._backend.shutdown()
        elif abort:
            # Gloo's destructor joins threads that may wait for a dead rank until the group's timeout, and the process
            # would not end. So leak the objects: they end with the process.
            for kept in (self._group, self._backend):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        del self._group, self._backend


_peer = attrgetter("peer")


class GlooTransport(Transport):
    """Point-to-point over gloo: its threads move a batch during compute, and the host waits where it lands."""

    name = "gloo"

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._where: tuple[int, tuple[int, ...]] = (-1, ())
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def where(self) -> tuple[int, tuple[int, ...]]:
        return self._where

    def start(self) -> None:
        self._where = (0, ())

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        self.sending = sends(True)
        self._where = after + 1, tuple(map(_peer, receives))
        self.works = self._communicator.post(self.sending, receives)

    def land(self) -> None:
        if works := self.works:
            self._communicator.wait(lambda: [work.wait() for work in works])
        self.works, self.sending = [], ()
        self._where = self._where[0] + 1, ()


class NcclTransport(StreamTransport):
    """Point-to-point over NCCL; the host never waits."""

    name = "nccl"

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.device)
        self._communicator = communicator
        self.works: list[dist.Work] = []
        self.sending: Sequence[Send] = ()

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        with self.moving():
            self.wait_for_compute(after)
            self.sending = sends(True)
            self.works = self._communicator.post(self.sending, receives)
        self.awaited[self.steps] = tuple(map(_peer, receives))

    def land(self) -> None:
        with self.moving():
            for work in self.works:
                work.wait()  # the communication stream waits, not the host
        self.works, self.sending = [], ()
        super().land()


_ONE_DEVICE = "their memory is on one device of a process, and this is another"
_ONE_QUEUE = "with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels would queue up behind its waits, which has not been measured"


class Transports:
    """The open transports of the ranks of a channel, by device and kind: streams and communicators belong to one."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._open: dict[tuple[str, str], Transport] = {}

    def get(self, device: torch.device, kind: str = "auto") -> Transport:
        """Return the transport for tensors on that device; the first call is collective.

        The first call comes after the ranks have agreed: one with tensors elsewhere has been told so.

        kind: "p2p", "copy_engine", which is refused where it cannot serve, or "auto" for the faster one that serves.
        """
        key = str(device), kind
        if key not in self._open:
            self._open[key] = self._make(device, kind)  # which may open another kind
            self._channel.calls.on_device(device)
        return self._open[key]

    def _make(self, device: torch.device, kind: str) -> Transport:
        if kind == "auto" and device.type != "cpu":
            why = _ONE_QUEUE if self._channel.one_queue else ""  # Megatron asks for one queue on Hopper
            try:
                if not why:
                    return self.get(device, "copy_engine")
            except UnsupportedError as error:
                why = error.why
            logger.info("messages go point to point: the copy engines do not serve: %s", why)
        if kind == "auto":
            return self.get(device, "p2p")
        if kind == "copy_engine":
            from dfa_megatron.runtime.comm.copy_engine import open_transport  # which other transports need not load

            others = any(kind == other for _, other in self._open)
            found = _ONE_DEVICE if others else open_transport(self._channel, device)
            if isinstance(found, str):
                raise UnsupportedError("transport='copy_engine'", found, "transport='p2p'")
            return found
        own = self._channel.communicator(device)
        return GlooTransport(own) if device.type == "cpu" else NcclTransport(own)

    def reserve(self, device: torch.device, kind: str, nbytes: int) -> Transport:
        """Return that kind of transport, with receive memory for a new attention; collective if memory moves.

        If a GPU has no memory for it, "auto" is point to point from then on; "copy_engine" is refused on every rank.
        """
        transport = self._open.get((str(device), kind)) or self.get(device, kind)
        try:
            transport.reserve(nbytes)
        except UnsupportedError as error:
            if kind != "auto":
                raise
            logger.warning("messages go point to point from now on: %s", error.why)
            transport = self._open[str(device), kind] = self.get(device, "p2p")
        return transport

    def release(self) -> bool:
        """Let go of what streams wait for, after a rank is lost; return whether one still waits."""
        waits = [transport.release() for transport in list(self._open.values())]
        return any(waits)

    def clear(self) -> None:
        """Let go of all transports and their memory."""
        self._open.clear()
