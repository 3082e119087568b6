"""Whether Triton can be used here, its interpreter included, and what its kernels share: sizes, bounds, launches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from dfa_megatron.kernels.alibi import Alibi
from dfa_megatron.kernels.segments import Segments, moved, stream_of
from dfa_megatron.plan.language.geometry import Band

OLDEST = (3, 2)
_FAR = 1 << 30
"""A diagonal that no pair reaches, small enough that 32-bit arithmetic on it does not overflow."""


def interpreted() -> bool:
    """TRITON_INTERPRET=1: kernels run in Triton's interpreter, on CPU tensors too. Read when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def triton_refusal() -> str | None:
    """Why no Triton kernel can be compiled here, with the version found, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        found: str = importlib.import_module("triton").__version__
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"triton {found} is older than {OLDEST[0]}.{OLDEST[1]}"
    if not interpreted() and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return f"triton {found} finds no C compiler (gcc, clang or $CC) to build its launcher with"
    return None


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's; where it is, nothing is switched."""
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a kernel run at a time, at least; 1 on CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def large_shared_memory(device: torch.device) -> bool:
    """A block may have over 200 KiB of shared memory: Hopper and Blackwell but its consumer chips."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10, 11)


@dataclass(frozen=True, slots=True)
class Diagonals:
    """A band as the kernels read it: row i sees column j when lo <= j - i <= hi, and which of the two can bind."""

    lo: int
    hi: int
    has_lo: bool
    has_hi: bool

    @classmethod
    def of(cls, band: Band, q_len: int, kv_len: int) -> Diagonals:
        """The diagonals of a call's band."""
        offset = kv_len - q_len
        lo = -_FAR if band.left < 0 else max(offset - band.left, -_FAR)
        hi = _FAR if band.right < 0 else min(offset + band.right, _FAR)
        return cls(lo, hi, has_lo=lo > 1 - q_len, has_hi=hi < kv_len - 1)


@dataclass(frozen=True, slots=True)
class Packed:
    """Which rows of which segment each program works on, and which bounds can bind in some segment.

    table: int32 (programs, PACKED_COLUMNS): first query row, query rows, first key row, key rows, lo, hi of the
        segment, and which of its blocks it is; programs with much work come first.
    """

    table: torch.Tensor
    has_lo: bool
    has_hi: bool

    @classmethod
    def of(cls, segments: Segments, by: Literal["rows", "columns"], block: int, device: torch.device) -> Packed:
        """The programs over blocks of that many query rows, or key rows ("columns"); made once per device."""
        key = "triton", by, block, device, stream_of(device)
        if key not in segments.tables:
            segments.tables[key] = cls._made(segments, by, block, device)
        packed: Packed = segments.tables[key]
        return packed

    @classmethod
    def _made(cls, segments: Segments, by: str, block: int, device: torch.device) -> Packed:
        programs: list[tuple[int, tuple[int, ...]]] = []
        has_lo = has_hi = False
        for s in segments.parts:
            q_len, kv_len = s.q_hi - s.q_lo, s.kv_hi - s.kv_lo
            d = Diagonals.of(s.band, q_len, kv_len)
            has_lo, has_hi = has_lo or d.has_lo, has_hi or d.has_hi
            length, other, lo, hi = (q_len, kv_len, d.lo, d.hi) if by == "rows" else (kv_len, q_len, -d.hi, -d.lo)
            for number, first in enumerate(range(0, length, block)):
                seen = min(other, min(first + block, length) + hi) - max(0, first + lo)
                programs.append((-seen, (s.q_lo, q_len, s.kv_lo, kv_len, d.lo, d.hi, number)))
        flat = [value for _, program in sorted(programs) for value in program]
        return cls(moved(flat, torch.int32, device).view(-1, PACKED_COLUMNS), has_lo, has_hi)


PACKED_COLUMNS = 7


def alibi_pointers(alibi: Alibi | None) -> tuple[torch.Tensor | None, ...]:
    """slopes, q_positions and kv_positions as the kernels take them."""
    return (None, None, None) if alibi is None else (alibi.slopes, alibi.q_positions, alibi.kv_positions)


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself, strided as it is, or a contiguous copy where the last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(dim: int) -> int:
    """The next power of two, and at least the 16 that a matrix product needs."""
    return max(16, 1 << (dim - 1).bit_length())
