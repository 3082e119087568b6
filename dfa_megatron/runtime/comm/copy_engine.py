"""The copy-engine transport: every rank writes into its peers' memory, and messages take no multiprocessor.

Messages land in an arena of symmetric memory that every rank of the group has mapped. Each pair of ranks has two flags:

- `ready`, in the sender's memory, set by the receiver: the memory for this step's message is free.
- `filled`, in the receiver's memory, set by the sender: the message has arrived.

A raised flag holds the token of its call (`Calls.token`), so a rank never takes the flag of another call for its own.
The rank that has waited for a flag clears it. So a step needs no number, and a captured graph can be replayed. Every
rank raises its `ready` flags of a step before it waits for any: by induction on the step no rank waits for ever.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dfa_megatron.runtime.agreement.calls import Facts
from dfa_megatron.runtime.comm.symmetric_memory import KeptArena, Mapped, first_reason, symmetric
from dfa_megatron.runtime.comm.transport import Recv, Send, Sends, StreamTransport
from dfa_megatron.runtime.cuda_driver import Copy, Flag, Flags, driver
from dfa_megatron.runtime.environment import forbids_p2p, host

if TYPE_CHECKING:
    from dfa_megatron.runtime.comm.channel import Channel

logger = logging.getLogger(__name__)

_TRIAL_SECONDS, _WORD = 30.0, 4
_RELEASING, _DWELL = 0.5, 1e-4
"""Seconds for which flags are raised at a time, and after which the queue must have seen one."""


class _Batch(NamedTuple):
    """Operations on flags: before the message to each receiver, and after the last one until the batch has landed."""

    before: list[Flags]
    after: Flags


class CopyEngineTransport(KeptArena, StreamTransport):
    """Moves messages with the GPUs' copy engines; all ranks on one host, each GPU able to reach all others.

    over: the channel of the ranks. device: this rank's GPU.

    `_issued` holds the token and the end of each call that the device may not have done yet.
    """

    name = "copy_engine"

    def __init__(self, over: Channel, device: torch.device) -> None:
        KeptArena.__init__(self, over, device)
        StreamTransport.__init__(self, device)
        self.driver = driver()
        self._flags = self.allocate(2 * over.size * _WORD)
        self._place_flags(over.rank, self._flags.addresses)
        self._sending: Sequence[Send] = ()
        self._queue = self.stream.cuda_stream
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], _Batch] = {}
        self._finished, self._finished_on = torch.cuda.Event(), self.compute
        self._token, self._issued, self._captured = 1, deque[tuple[int, torch.cuda.Event]](), set[int]()
        self._releases = torch.cuda.Stream(device)

    def _place_flags(self, rank: int, addresses: Sequence[int]) -> None:
        """Locate the flags. Each rank has one array: `ready` by the peer to send to, then `filled` by the sender."""
        size = len(addresses)
        self._my_ready = [addresses[rank] + peer * _WORD for peer in range(size)]
        self._my_filled = [addresses[rank] + (size + peer) * _WORD for peer in range(size)]
        self._their_ready = [address + rank * _WORD for address in addresses]
        self._their_filled = [address + (size + rank) * _WORD for address in addresses]

    def allocate(self, nbytes: int) -> Mapped:
        return symmetric(nbytes, self.over, self.device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def start(self) -> None:
        """Hold messages until the inputs are ready and the previous call has read its arena."""
        super().start()
        self._token = self.over.calls.token(self.captured)
        if self.captured:  # where CUDA forbids to ask an event whether it is done
            self.pinned = True
            self._captured.add(self._token)
            return
        while self._issued and self._issued[0][1].query():
            self._issued.popleft()
        if self._finished_on is not self.compute:
            self.stream.wait_event(self._finished)

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Queue the batch on the communication stream: raise `ready` flags, write where ranks are ready, wait."""
        token, queue = self._token, self.driver
        self.wait_for_compute(after)
        self._sending, senders = sends(False), tuple([recv.peer for recv in receives])
        batch = self._flags_of(tuple([send.peer for send in self._sending]), senders)
        for flags, send in zip(batch.before, self._sending, strict=True):
            queue.flags(self._queue, flags, token)
            arena = self._addresses[send.peer]
            for x, copy in zip(send.tensors, send.copies, strict=True):
                queue.copy(self._queue, arena, x.data_ptr(), copy)
        queue.flags(self._queue, batch.after, token)
        self.awaited[self.steps] = senders

    def land(self) -> None:
        self._sending = ()
        super().land()

    def _flags_of(self, receivers: tuple[int, ...], senders: tuple[int, ...]) -> _Batch:
        """Return the operations on flags around the messages of a batch, in this order of messages."""
        if (receivers, senders) in self._batches:
            return self._batches[receivers, senders]
        batches = [[Flag(False, self._their_ready[peer], True) for peer in senders]]
        for peer in receivers:
            ready = self._my_ready[peer]
            batches[-1] += Flag(True, ready, True), Flag(False, ready, False)
            batches.append([Flag(False, self._their_filled[peer], True)])
        landed = [self._my_filled[peer] for peer in senders]
        batches[-1] += [flag for filled in landed for flag in (Flag(True, filled, True), Flag(False, filled, False))]
        *before, after = map(Flags, batches)
        return self._batches.setdefault((receivers, senders), _Batch(before, after))

    def finish(self) -> None:
        """Record the end of the call's compute, after which the next call may use the arena."""
        if not self.captured:
            self._finished = torch.cuda.Event()
            self._finished.record(self.compute)
            self._finished_on = self.compute
            self._issued.append((self._token, self._finished))

    def release(self) -> bool:
        """Raise this rank's flags for the call that waits, and so for one after the other, until the queue is done."""
        flags = Flags([Flag(False, address, True) for address in (*self._my_ready, *self._my_filled)])
        deadline = time.monotonic() + _RELEASING
        while waits := not self.stream.query():
            running = next((token for token, end in self._issued.copy() if not end.query()), self._token)
            for token in (running, *self._captured):
                self.driver.flags(self._releases.cuda_stream, flags, token)
                self._releases.synchronize()
                time.sleep(_DWELL)
            if time.monotonic() > deadline:
                break
        return waits

    def trial(self) -> None:
        """Send a word to every other rank; raise a RuntimeError if one arrives wrong, or not at all."""
        rank, size = self.over.rank, self.over.size
        self.reserve(size * _WORD)
        mine = torch.arange(rank * size, (rank + 1) * size, dtype=torch.int32, device=self.device)
        landing = self._arena[: size * _WORD].view(torch.int32)
        peers = [peer for peer in range(size) if peer != rank]
        sends = [Send(peer, [mine], [Copy(peer * _WORD, rank * _WORD, _WORD)]) for peer in peers]
        self.start()
        self.post(-1, lambda _: sends, [Recv(peer, [landing[peer : peer + 1]]) for peer in peers])
        self.land()
        self.finish()
        done, deadline = torch.cuda.Event(), time.monotonic() + _TRIAL_SECONDS
        done.record()
        while not done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a word to each other rank did not arrive within {_TRIAL_SECONDS:.0f} seconds")
            time.sleep(0.001)
        got = landing.tolist()
        if wrong := {peer: got[peer] for peer in peers if got[peer] != peer * size + rank}:
            raise RuntimeError(f"words from other ranks arrived wrong: {wrong}")


def open_transport(over: Channel, device: torch.device) -> CopyEngineTransport | str:
    """Return a transport that has passed its trial, or why there is none; equal on every rank. Collective."""
    # What tells a GPU of this host from its others, whatever number it has in this process.
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    mine = {"host": host(), "device": str(device.index or 0), "gpu": gpu, "why": _local_refusal(device)}
    everyone = over.exchange(mine)
    if why := refusal(over, device, everyone):
        return why
    transport, failed = None, ""
    try:
        transport = CopyEngineTransport(over, device)
        transport.trial()
    except Exception as error:  # noqa: BLE001 -- drivers, fabric and permissions fail in many ways; p2p still works
        failed = f"{type(error).__name__}: {error}"
    return first_reason(over.exchange({"why": failed})) or transport or failed


def refusal(over: Channel, device: torch.device, everyone: list[Facts]) -> str:
    """Return why the copy engines cannot serve the ranks of a channel, or ""; equal on every rank. Collective."""
    if len({facts["host"] for facts in everyone}) > 1:
        return "the ranks are on several hosts"
    if why := first_reason(everyone):
        return why
    if len({facts["gpu"] for facts in everyone}) < over.size:
        return "ranks share a GPU"
    devices, blind = {int(facts["device"]) for facts in everyone}, list[int]()
    # A number means one GPU in every process; else each process sees some of them, and the trial shows what it reaches.
    if len(devices) == len({facts["gpu"] for facts in everyone}) <= torch.cuda.device_count():
        blind = [d for d in sorted(devices) if d != device.index and not torch.cuda.can_device_access_peer(device, d)]
    mine = f"GPU {device.index} cannot reach the memory of {blind}" if blind else ""
    return first_reason(over.exchange({"why": mine}))


def _local_refusal(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it moves between GPUs, not on {device.type}"
    if forbids_p2p():
        return "NCCL_P2P_DISABLE=1 says that GPUs must not reach each other's memory"
    try:
        import torch.distributed._symmetric_memory

        driver()
    except (ImportError, OSError) as error:
        return f"PyTorch {torch.__version__}: {error}"
    return ""
