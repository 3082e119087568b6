"""Packed documents as the planner takes them: global token offsets, read from a tensor without stopping the device."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import plain
from dfa_megatron.plan.language.mask import Mask, documents, of_window

Offsets = tuple[int, ...]
"""0, the end of the first document, ..., the length of the pack."""

CuSeqlens = torch.Tensor | Sequence[int] | Sequence[torch.Tensor | Sequence[int]] | None
"""Global token offsets of packed documents; those of every row of a batch, each from 0; or None for no documents."""

_seen: list[Offsets] = [()]
"""The tuple that was checked last: the layers of a model bring the same one."""

_on_device: dict[int, tuple[weakref.ref[torch.Tensor], int, Offsets]] = {}
"""id of a CUDA tensor -> (the tensor, its version when it was read, what it held)."""


def offsets_of(cu_seqlens: CuSeqlens, device: torch.device | None = None) -> Offsets:
    """Return the offsets as a tuple of numbers. cu_seqlens: int32 (documents + 1), or as many Python integers.

    A CUDA tensor is read once, which waits for the device, and known again by its identity and version: layers that
    share one read it once a batch. Others cost no synchronisation. device: of the tokens; a tensor must be there or on
    the CPU. None for no tokens.
    """
    x = cu_seqlens
    if x is _seen[0]:
        return _seen[0]
    if not isinstance(x, torch.Tensor):
        x = plain(x)
        if isinstance(x, Sequence) and all(isinstance(offset, int) for offset in x):
            _seen[0] = tuple(x)  # type: ignore[arg-type]
            return _seen[0]
        raise UnsupportedError("cu_seqlens", "it must hold integers", "an int32 tensor, or a tuple of int")
    if x.dtype != torch.int32 or x.dim() != 1:
        what = f"cu_seqlens of dtype {x.dtype} and shape {tuple(x.shape)}"
        raise UnsupportedError(what, "it holds one offset per document and the length", "int32 (documents + 1)")
    if not x.is_cpu and device is not None and x.device != device:
        what = f"cu_seqlens on {x.device} with tokens on {device}"
        raise UnsupportedError(what, "it would be read from another device", f"a tensor on the CPU or on {device}")
    if not x.is_cuda or x.is_inference():  # which has no version
        return tuple(x.tolist())
    key, version = id(x), x._version
    known = _on_device.get(key)
    if known is None or known[0]() is not x or known[1] != version:
        gone = weakref.ref(x, lambda _: _on_device.pop(key, None))
        known = _on_device[key] = gone, version, tuple(x.tolist())
    return known[2]


def rows_of(cu_seqlens: CuSeqlens, x: torch.Tensor | None = None) -> tuple[Offsets, ...]:
    """Return the offsets of every row of a batch (of x, if given), () where `cu_seqlens` are those of one sequence."""
    if not isinstance(cu_seqlens, list | tuple) or not cu_seqlens or isinstance(cu_seqlens[0], Real):
        return ()
    if x is not None:
        check_rows(cu_seqlens, x)
    return tuple([offsets_of(row, x if x is None else x.device) for row in cu_seqlens])


def check_rows(rows: Sequence[Any], x: torch.Tensor) -> None:
    """Refuse what rows attend to, where the batch of x has another number of them."""
    if (batch := x.shape[0] if x.dim() else 0) != len(rows):
        what = f"documents or masks of {len(rows)} rows in a batch of {batch}"
        raise UnsupportedError(what, "each row has its own", "a list of as many, or one for all rows")


@lru_cache(maxsize=8)  # layers of one pack, and the mask that balances it
def mask_of(offsets: Offsets, length: int, *, causal: bool, window_size: tuple[int, int]) -> Mask:
    """Return the mask of a pack's documents, those of no tokens left out; a single document is a plain sequence."""
    check_offsets(offsets, length)
    offsets = tuple(dict.fromkeys(offsets))
    if len(offsets) == 2:
        return of_window(length, causal, window_size)
    return documents([hi - lo for lo, hi in pairwise(offsets)], causal=causal, window_size=window_size)


def balancing_mask(offsets: Offsets, length: int) -> Mask:
    """The mask that "load_balanced" shares tokens out by, whatever a layer attends to: causal documents."""
    return mask_of(offsets, length, causal=True, window_size=(-1, -1))


def check_offsets(offsets: Offsets, length: int | None = None) -> None:
    """Refuse offsets that are no documents of a pack of that many tokens (None: of any), and say which is wrong."""
    why, instead = "", "0, the end of every document in order, the last of which is the pack's length"
    if len(offsets) < 2 or (offsets[0] == offsets[-1] == 0 and length != 0):
        why = "there is no document of any token"
    elif offsets[0]:
        why = f"it starts at {offsets[0]}, not at 0"
    elif wrong := [(at, lo, hi) for at, (lo, hi) in enumerate(pairwise(offsets)) if hi < lo]:
        why = "it may not fall, but document {} would be tokens {} to {}".format(*wrong[0])
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
