"""Refuse the index of a checkpoint, which PyTorch stores as a pickle, if reading it would run code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

_METADATA = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
_TENSORS = ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (*_METADATA, *_TENSORS)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _Plain(pickle.Unpickler):  # noqa: S301 (find_class lets through the names above only)
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def refuse_code(path: Path) -> None:
    """Read the index `.metadata` at `path` and allow only the classes that an index needs.

    Raises:
        pickle.UnpicklingError: the index names another class or function.
    """
    with path.open("rb") as file:
        _Plain(file).load()
