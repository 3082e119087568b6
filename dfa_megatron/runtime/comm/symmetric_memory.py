"""Memory that every rank of a group can write into, and the arena of a group in it, which stays between calls.

All plans share the arena, and it is as large as recent calls need. It moves on all ranks at the same call: each counts
the same calls. A group that calls nothing keeps it until the group is destroyed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.agreement.calls import Facts
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.environment import without_multicast

if TYPE_CHECKING:
    from dfa_megatron.runtime.comm.channel import Channel


class Mapped(NamedTuple):
    """This rank's memory, and the address of every rank's."""

    memory: torch.Tensor
    addresses: list[int]


def symmetric(nbytes: int, over: Channel, device: torch.device) -> Mapped:
    """Return zeroed memory that every rank of a channel has mapped; collective.

    Raises:
        UnsupportedError: on every rank if one has no memory for it.
    """
    memory, why = None, ""
    try:
        memory = _zeros(nbytes, device)
    except RuntimeError as error:
        why = f"found no memory, {nbytes / 2**30:.1f} GiB for what other ranks write: {error}"
    if why := first_reason(over.exchange({"why": why}), " "):
        raise UnsupportedError("transport='copy_engine'", why, "transport='p2p'")
    assert memory is not None, "this rank has said that it has its memory"
    from torch._C._distributed_c10d import _SymmetricMemory

    name = over.communicator(torch.device("cpu")).symmetric_name()
    with without_multicast():
        addresses = list(_SymmetricMemory.rendezvous(memory, name).buffer_ptrs)
    torch.cuda.synchronize(device)
    over.exchange({})
    return Mapped(memory, addresses)


def first_reason(everyone: list[Facts], says: str = ": ") -> str:
    """Return what the first rank says that gives a reason, "" where none does."""
    return next((f"rank {rank}{says}{facts['why']}" for rank, facts in enumerate(everyone) if facts["why"]), "")


@torch.inference_mode(False)  # it outlives the call that asks for it
def _zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory that others can map. It comes from the driver: if that has none, PyTorch's cache is emptied."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with without_multicast():
        try:
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError:
            torch.cuda.empty_cache()
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return memory.zero_()


logger = logging.getLogger(__name__)

PATIENCE = 4096
"""Calls in a row that need at most half of the arena, after which the rest is given back.

To move it stops all ranks for some tenths of a second. An evaluation between steps costs no move: 32 layers make so
many calls in 64 steps.
"""

_ALIGNMENT = 1 << 21


class KeptArena(Transport):
    """A transport that keeps an arena.

    over: the channel of the ranks. device: of the arena. gives_back: for the whole process, see `keep_arenas`.
    """

    gives_back = True
    _calls = _most = 0
    """The calls since the last that needed more than half of the arena, and the most bytes of them."""

    def __init__(self, over: Channel, device: torch.device) -> None:
        self.over, self.device = over, device
        self._arena, self._addresses = Mapped(torch.empty(0, dtype=torch.uint8, device=device), [])

    def allocate(self, nbytes: int) -> Mapped:
        """Return memory for an arena, or raise an UnsupportedError on every rank; collective."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until nothing that was issued here reads or writes any rank's arena."""
        raise NotImplementedError

    def reserve(self, nbytes: int) -> None:
        """Make the arena large enough for the next call, and count it; every rank calls this with the same number.

        Raises:
            UnsupportedError: on every rank if one has no memory for it, or it may not move.
        """
        size = self._arena.numel()
        if nbytes > size:
            self._move(nbytes)
        elif 2 * nbytes >= size or self.pinned or not self.gives_back:
            self._calls = self._most = 0
        else:
            self._calls, self._most = self._calls + 1, max(self._most, nbytes)
            if self._calls >= PATIENCE and not self._stays():
                if _aligned(self._most) < size:
                    self._move(self._most)
                self._calls = self._most = 0

    def arena(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the arena; it belongs to one call at a time."""
        return self._arena

    def _move(self, nbytes: int) -> None:
        """Let go of the arena and make one of that size; collective."""
        before, size, why = self._arena.numel(), _aligned(nbytes), self._stays()
        if not why:
            self.settle()
        self.over.agree({"call": "move the memory for messages", "bytes": str(size), "why not": why})
        if why:
            what = f"messages that need {nbytes / 2**30:.2f} GiB beside an arena of {before / 2**30:.2f}"
            raise UnsupportedError(what, why, "one run of the largest call before any capture, or transport='p2p'")
        # The old arena goes first, even if the new one fails. Its memory is free once every rank has let go of it.
        self._arena, self._addresses = Mapped(torch.empty(0, dtype=torch.uint8, device=self.device), [])
        self._calls = self._most = 0
        self.over.exchange({})
        if size:
            self._arena, self._addresses = self.allocate(size)
        logger.info("memory for messages: %.2f GiB, was %.2f", size / 2**30, before / 2**30)

    def _stays(self) -> str:
        """Return why the arena may not move, or ""."""
        if self.pinned:
            return "a captured CUDA graph holds addresses in it"
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return ""


def keep_arenas() -> None:
    """Give nothing back in this process; every rank says so.

    PyTorch frees this memory once the device has done all its work. In a pipeline that may include a message from
    another stage, which waits in the same way for one from here.
    """
    KeptArena.gives_back = False


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
