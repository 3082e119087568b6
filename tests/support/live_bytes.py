"""Count the bytes of tensors that PyTorch's operators make and that are alive, at their peak; and what stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfa_megatron import remat
from dfa_megatron.remat.saved import Kept


class LiveBytes(TorchDispatchMode):
    """Watch the storages of results within the block that somebody still holds; `most` are their sizes at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most: list[int] = []
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in given | {*self.storages}:
                self.storages[storage._cdata] = weakref.ref(storage)
                weakref.finalize(storage, self.storages.pop, storage._cdata)
                self.largest = max(self.largest, storage.nbytes())
        self.look()
        return results

    def look(self) -> None:
        """Count again; what is no operation may have given storages their memory."""
        found = [storage.nbytes() for weak in list(self.storages.values()) if (storage := weak()) is not None]
        if sum(found) > self.peak:
            self.most = found

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return sum(self.most)


def living() -> dict[str, int]:
    """Return how many tensors, and parts of rematerialized regions, the interpreter still has."""
    gc.collect()
    kinds = {"tensors": torch.Tensor, "frames": remat.Frame, "regions": remat._SavedRegion, "pairs": Kept}
    return {name: sum(issubclass(type(item), kind) for item in gc.get_objects()) for name, kind in kinds.items()}


def held() -> dict[int, int]:
    """Return the bytes of every storage that a tensor of Python holds, by the storage."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type != "meta"]
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
