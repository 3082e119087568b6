"""Own connections between the ranks of a group: gloo for tensors on CPUs, NCCL for tensors on GPUs.

torch.distributed does not know them by name, so a group may be made and destroyed at any time.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime.agreement.store import GroupStore
from dfa_megatron.runtime.comm.transport import Recv, Send

logger = logging.getLogger(__name__)


class Communicator:
    """One set of connections for tensors on a device; to make one is collective.

    broken: returns the error to raise if NCCL reports that a connection broke: NCCL does not name the rank.
    """

    def __init__(
        self,
        store: GroupStore,
        device: torch.device,
        timeout: timedelta,
        broken: Callable[[RuntimeError], DistAttentionError],
    ) -> None:
        self._store, self.device, self.timeout, self._broken = store.fresh(), device, timeout, broken
        self._name: Any = ""
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
        """Start a batch of messages: on NCCL's own stream after the current one, or in gloo's threads.

        Raises:
            AbsentError: NCCL reports a broken connection.
        """
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
        except dist.DistBackendError as error:
            raise self._broken(error) from error

    def gather(self, x: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
        """Gather every rank's tensor of this shape; the list, by rank, is filled once the work is done."""
        found = list(x.new_empty((self._group.size(), *x.shape)).unbind())
        return found, self._group.allgather([found], [x])

    def all_to_all(self, received: torch.Tensor, send: torch.Tensor, counts: list[int]) -> dist.Work:
        """Send the rows of `send` to the ranks in their order, counts[i] to rank i, and receive as many from each.

        Raises:
            AbsentError: NCCL reports a broken connection.
        """
        if self.device.type == "cpu":  # gloo does not know every dtype
            received, send = received.view(torch.uint8), send.view(torch.uint8)
        try:
            # Past PyTorch's dispatcher: the host's time until a message leaves is on a short call's critical path.
            work: dist.Work = self._backend.alltoall_base(received, send, counts, counts, dist.AllToAllOptions())
        except dist.DistBackendError as error:
            raise self._broken(error) from error
        return work

    def give_name(self, name: Any) -> None:
        """Register these ranks with PyTorch's symmetric memory under a name that is unique; collective."""
        from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

        self._group._set_group_name(name)
        _register_process_group(name, self._group)
        _SymmetricMemory.set_group_info(name, self._group.rank(), self._group.size(), self._store)
        self._name = name

    def close(self, *, abort: bool) -> None:
        """Close the connections. abort: do not wait for messages under way."""
        if self._name:
            torch._C._distributed_c10d._unregister_process_group(self._name)
        if self.device.type != "cpu":
            with torch.cuda.device(self.device):  # the thread that closes may not be the one that has computed
                if abort:
                    self._backend.abort()
                else:
                    self._backend.shutdown()
        elif abort:
            # Gloo's destructor joins threads that may wait for a dead rank until the group's timeout, and the process
            # would not end. So leak the objects: they end with the process.
            for kept in (self._group, self._backend):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        del self._group, self._backend
