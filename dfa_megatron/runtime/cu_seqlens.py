"""Packed documents as the planner takes them: global token offsets, read from a tensor without stopping the device."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.mask import Mask, documents, of_window

Offsets = tuple[int, ...]
"""0, the end of the first document, ..., the length of the pack."""

_seen: list[Offsets] = [()]
"""The tuple that was checked last: the layers of a model bring the same one."""

_on_device: dict[int, tuple[weakref.ref[torch.Tensor], int, Offsets]] = {}
"""id of a CUDA tensor -> (the tensor, its version when it was read, what it held)."""


def offsets_of(cu_seqlens: torch.Tensor | Sequence[int], device: torch.device | None = None) -> Offsets:
    """Return the offsets as a tuple of numbers.

    A tuple, a list or a CPU tensor costs no synchronisation. A CUDA tensor is read once, which waits for the device,
    and known again by its identity and version: layers that share one read it once a batch.

    Args:
        cu_seqlens: int32 (documents + 1), or as many Python integers.
        device: of the tokens; a tensor must be there or on the CPU. None for no tokens.

    Raises:
        UnsupportedError: another type, dtype, shape or device.
    """
    if cu_seqlens is _seen[0]:
        return _seen[0]
    if not isinstance(cu_seqlens, torch.Tensor):
        if isinstance(cu_seqlens, Sequence) and all(isinstance(offset, int) for offset in cu_seqlens):
            _seen[0] = tuple(cu_seqlens)
            return _seen[0]
        raise UnsupportedError("cu_seqlens", "it must hold integers", "an int32 tensor, or a tuple of int")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        what = f"cu_seqlens of dtype {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)}"
        raise UnsupportedError(what, "it holds one offset per document and the length", "int32 (documents + 1)")
    if not cu_seqlens.is_cpu and device is not None and cu_seqlens.device != device:
        what = f"cu_seqlens on {cu_seqlens.device} with tokens on {device}"
        raise UnsupportedError(what, "it would be read from another device", f"a tensor on the CPU or on {device}")
    return _read_once(cu_seqlens) if cu_seqlens.is_cuda and not cu_seqlens.is_inference() else _read(cu_seqlens)


def _read_once(x: torch.Tensor) -> Offsets:
    key, version = id(x), x._version
    if (known := _on_device.get(key)) and known[0]() is x and known[1] == version:
        return known[2]
    offsets = _read(x)
    _on_device[key] = weakref.ref(x, lambda _: _on_device.pop(key, None)), version, offsets
    return offsets


def _read(x: torch.Tensor) -> Offsets:
    values: list[int] = x.tolist()
    return tuple(values)


@lru_cache(maxsize=8)  # layers of one pack, and the mask that balances it
def mask_of(offsets: Offsets, length: int, *, causal: bool, window_size: tuple[int, int]) -> Mask:
    """Return the mask of a pack's documents; a single document is a plain sequence.

    Raises:
        UnsupportedError: the documents do not have `length` tokens.
    """
    check_offsets(offsets, length)
    if len(offsets) == 2:
        return of_window(length, causal, window_size)
    return documents([hi - lo for lo, hi in pairwise(offsets)], causal=causal, window_size=window_size)


def balancing_mask(offsets: Offsets, length: int) -> Mask:
    """The mask that "load_balanced" shares tokens out by, whatever a layer attends to: causal documents."""
    return mask_of(offsets, length, causal=True, window_size=(-1, -1))


def check_offsets(offsets: Offsets, length: int | None = None) -> None:
    """Refuse offsets that are no documents of a pack of that many tokens (None: of any).

    Raises:
        UnsupportedError: says which offset is wrong.
    """
    why, instead = "", "0, the end of every document in order, the last of which is the pack's length"
    if len(offsets) < 2:
        why = "there is no document"
    elif offsets[0]:
        why = f"it starts at {offsets[0]}, not at 0"
    elif wrong := [(at, lo, hi) for at, (lo, hi) in enumerate(pairwise(offsets)) if hi <= lo]:
        document, lo, hi = wrong[0]
        why, instead = (
            f"it must increase, but document {document} would be tokens {lo} to {hi}",
            "documents of one token or more",
        )
    elif length is not None and offsets[-1] != length:
        why = f"it ends at {offsets[-1]}, but the ranks hold {length} tokens together"
        instead = f"global offsets, the last of which is {length}"
    if why:
        raise UnsupportedError(describe(offsets), why, instead)


def describe(offsets: Offsets) -> str:
    """The offsets for people: all of them, or the ends and a hash of the whole."""
    if len(offsets) <= 12:
        return f"cu_seqlens {offsets}"
    first, last = (", ".join(map(str, some)) for some in (offsets[:4], offsets[-2:]))
    digest = hashlib.sha256(repr(offsets).encode()).hexdigest()[:12]
    return f"cu_seqlens ({first}, ... {last}) of {len(offsets) - 1} documents #{digest}"
