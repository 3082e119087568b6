"""CUDA driver calls that PyTorch does not offer: copies and flags on a stream, and a thread's capture mode."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

_EQUAL, _RELAXED = 1, 2
"""CU_STREAM_WAIT_VALUE_EQ and CU_STREAM_CAPTURE_MODE_RELAXED"""
_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32"""


class Flag(NamedTuple):
    """An operation on a 32-bit flag: write it, or wait for it. token: the value is the batch's token, else it is 0."""

    wait: bool
    address: int
    token: bool


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams of a 32-bit wait or write."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


class Flags:
    """Operations on flags that are queued together, in their order: one call of the driver takes 5 microseconds."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self.flags = tuple(flags)
        ops = [_MemOp(_WAIT, x.address, 0, _EQUAL) if x.wait else _MemOp(_WRITE, x.address) for x in flags]
        self.queued = (_MemOp * len(ops))(*ops)
        self._raised = [op for op, flag in zip(self.queued, flags, strict=True) if flag.token]

    def set_token(self, token: int) -> None:
        """Set the value that flags are raised to and waited for."""
        for op in self._raised:
            op.value = token


class Copy(NamedTuple):
    """Equal runs of bytes, copied from one address on to another.

    skip, offset: the first byte, from the source and from the memory that is written. width: bytes of a run. height:
    runs. pitch, wide: bytes from run to run, in the source and in the memory that is written.
    """

    skip: int
    offset: int
    width: int
    height: int = 1
    pitch: int = 0
    wide: int = 0


def _side(side: str) -> list[tuple[str, Any]]:
    names = ("x", "y", "kind", "host", "address", "array", "pitch")
    return [(f"{side}_{name}", ctypes.c_uint32 if name == "kind" else ctypes.c_uint64) for name in names]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D between device addresses."""

    _fields_ = (
        *_side("source"),
        *_side("to"),
        ("width", ctypes.c_uint64),
        ("height", ctypes.c_uint64),
    )


_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says where it is, on this GPU or on another."""


class Driver:
    """Calls of libcuda: none of them takes a multiprocessor, and none makes the host wait.

    Without a driver of CUDA 11.7 or newer it raises an OSError.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(library, name, None)
            if found is None:
                raise OSError(f"the CUDA driver has no {name}")
            found.argtypes, found.restype = arguments, ctypes.c_int
            return found

        stream, address = ctypes.c_void_p, ctypes.c_uint64
        self._error = library.cuGetErrorString
        self._copy = function("cuMemcpyAsync", address, address, ctypes.c_size_t, stream)
        self._copy_2d = function("cuMemcpy2DAsync_v2", ctypes.POINTER(_Copy2D), stream)
        self._batch = function("cuStreamBatchMemOp_v2", stream, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._capture_mode = function("cuThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int))

    def relax_captures(self) -> bool:
        """Let this thread query events while another one captures a graph; True."""
        self._check(self._capture_mode(ctypes.byref(ctypes.c_int(_RELAXED))), "cuThreadExchangeStreamCaptureMode")
        return True

    def copy(self, stream: int, to: int, source: int, copy: Copy) -> None:
        """Queue a copy between device addresses; between two GPUs a copy engine runs it."""
        skip, offset, width, height, pitch, wide = copy
        source, to = source + skip, to + offset
        if height == 1:
            self._check(self._copy(to, source, width, stream), "cuMemcpyAsync")
            return
        runs = _Copy2D(
            source_kind=_UNIFIED, source_address=source, source_pitch=pitch,
            to_kind=_UNIFIED, to_address=to, to_pitch=wide, width=width, height=height,
        )  # fmt: skip
        self._check(self._copy_2d(ctypes.byref(runs), stream), "cuMemcpy2DAsync")

    def flags(self, stream: int, flags: Flags, token: int) -> None:
        """Queue operations on flags: writes after everything queued before, waits for words of the stream's own GPU."""
        if flags.flags:
            flags.set_token(token)
            self._check(self._batch(stream, len(flags.flags), flags.queued, 0), "cuStreamBatchMemOp")

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._error(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with code {code}: {(text.value or b'?').decode()}")


@functools.cache
def driver() -> Driver:
    """Return the process's driver."""
    return Driver()
