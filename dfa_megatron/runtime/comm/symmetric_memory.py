"""Memory that every rank of a group can write into, and the arena of a group in it, which stays between calls.

All plans share the arena, which grows with the largest call, on all ranks at once. The group keeps it until it is
destroyed.
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
    """Return zeroed memory that every rank of a channel has mapped, or refuse on every rank; collective."""
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

_ALIGNMENT = 1 << 21


class KeptArena(Transport):
    """A transport that keeps an arena.

    over: the channel of the ranks. device: of the arena.
    """

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
        """Make the arena large enough for a new attention; every rank calls this with the same number.

        All refuse if one has no memory for it, or it may not move.
        """
        if nbytes > self._arena.numel():
            self._grow(nbytes)

    def arena(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the arena; it belongs to one call at a time."""
        return self._arena

    def _grow(self, nbytes: int) -> None:
        """Let go of the arena and make one of that size; collective."""
        before, size, why = self._arena.numel(), -(-nbytes // _ALIGNMENT) * _ALIGNMENT, self._stays()
        if not why:
            self.settle()
        self.over.agree({"call": "move the memory for messages", "bytes": str(size), "why not": why})
        if why:
            what = f"messages that need {nbytes / 2**30:.2f} GiB beside an arena of {before / 2**30:.2f}"
            raise UnsupportedError(what, why, "one run of the largest call before any capture, or transport='p2p'")
        # The old arena goes first, even if the new one fails. Its memory is free once every rank has let go of it.
        self._arena, self._addresses = Mapped(torch.empty(0, dtype=torch.uint8, device=self.device), [])
        self.over.exchange({})
        self._arena, self._addresses = self.allocate(size)
        logger.info("memory for messages: %.2f GiB, was %.2f", size / 2**30, before / 2**30)

    def _stays(self) -> str:
        """Return why the arena may not move, or ""."""
        if self.pinned:
            return "a captured CUDA graph holds addresses in it"
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return ""
