"""Memory of every rank of a host that all its ranks have mapped: PyTorch's, or CUDA's own where ranks share a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.environment import without_multicast

if TYPE_CHECKING:
    from dfa_megatron.runtime.comm.channel import Channel

SUBJECT = "open the copy engines"


class Mapped(NamedTuple):
    """This rank's memory, and the address of every rank's. others: keeps the memory of other processes mapped."""

    memory: torch.Tensor
    addresses: list[int]
    others: tuple[torch.UntypedStorage, ...] = ()


def symmetric(nbytes: int, over: Channel, device: torch.device, *, shared: bool) -> Mapped:
    """Return zeroed memory that every rank of a channel has mapped; collective. shared: some have the same GPU.

    Raises:
        UnsupportedError: on every rank if one has no memory for it.
    """
    memory, why = None, ""
    try:
        memory = (_of_pytorchs_allocator if shared else _zeros)(nbytes, device)
    except RuntimeError as error:
        why = f"{nbytes / 2**30:.1f} GiB for what other ranks write: {error}"
    for rank, facts in enumerate(over.exchange({"why": why}, SUBJECT)):
        if facts["why"]:
            why = f"rank {rank} found no memory, {facts['why']}"
            raise UnsupportedError("transport='copy_engine'", why, "transport='p2p'")
    assert memory is not None, "this rank has said that it has its memory"
    mapped = (_opened if shared else _mapped)(memory, over)
    torch.cuda.synchronize(device)
    over.exchange({}, SUBJECT)
    return mapped


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


def _mapped(memory: torch.Tensor, over: Channel) -> Mapped:
    from torch._C._distributed_c10d import _SymmetricMemory

    name = over.symmetric_name()
    with without_multicast():
        return Mapped(memory, list(_SymmetricMemory.rendezvous(memory, name).buffer_ptrs))


@torch.inference_mode(False)
def _of_pytorchs_allocator(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _opened(memory: torch.Tensor, over: Channel) -> Mapped:
    """Open the memory of the other processes by CUDA's handles: PyTorch refuses ranks that share a GPU."""
    ranks = range(over.size)
    # One handle for each reader, because PyTorch counts how many have let go.
    mine = {str(rank): _handle(memory) for rank in ranks if rank != over.rank}
    everyone = over.exchange(mine, SUBJECT)
    device = memory.device.index
    others = {rank: _open(facts[str(over.rank)], device) for rank, facts in enumerate(everyone) if rank != over.rank}
    addresses = [others[rank].data_ptr() if rank in others else memory.data_ptr() for rank in ranks]
    return Mapped(memory, addresses, tuple(others.values()))


def _handle(memory: torch.Tensor) -> str:
    """Return what another process opens the memory by, as JSON; bytes are in hexadecimal."""
    return json.dumps([x.hex() if isinstance(x, bytes) else x for x in memory.untyped_storage()._share_cuda_()])


def _open(handle: str, device: int) -> torch.UntypedStorage:
    """Map the memory for a GPU of this process, which may be another than its own: CUDA opens the link between them."""
    _, memory, size, offset, counter, place, event, waits = json.loads(handle)
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        device, bytes.fromhex(memory), size, offset, bytes.fromhex(counter), place, bytes.fromhex(event), waits
    )
    return storage
