"""CUDA driver calls that PyTorch does not offer: copies and flags on a stream, and a thread's capture mode."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

_EQUAL, _RELAXED = 1, 2
"""CU_STREAM_WAIT_VALUE_EQ and CU_STREAM_CAPTURE_MODE_RELAXED"""
_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32"""
_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address says where it is, on this GPU or on another."""


_Copy2D = ctypes.c_uint64 * 16
"""A CUDA_MEMCPY2D. Fields of the driver's structures begin at words, and those of 32 bits are the lower half of one."""


class Flag(NamedTuple):
    """An operation on a 32-bit flag: write it, or wait for it. token: the value is the batch's token, else it is 0."""

    wait: bool
    address: int
    token: bool


class Flags:
    """Operations on flags that are queued together, in their order: one call of the driver takes 5 microseconds."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self.flags = tuple(flags)
        # Of a CUstreamBatchMemOpParams: operation, address, value, flags, alias, and one that is not used.
        ops = [(_WAIT, x.address, 0, _EQUAL, 0, 0) if x.wait else (_WRITE, x.address, 0, 0, 0, 0) for x in flags]
        self.queued = (ctypes.c_uint64 * (6 * len(ops)))(*chain(*ops))
        self._values = [6 * at + 2 for at, flag in enumerate(flags) if flag.token]

    def set_token(self, token: int) -> None:
        """Set the value that flags are raised to and waited for."""
        for at in self._values:
            self.queued[at] = token


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


class Driver:
    """Calls of libcuda: none of them takes a multiprocessor, and none makes the host wait.

    Raises:
        OSError: there is no driver, or it is older than CUDA 11.7.
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
        self._copy_2d = function("cuMemcpy2DAsync_v2", ctypes.c_void_p, stream)
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
        # x, y, kind, host, address, array and pitch of the source, then those of the memory that is written.
        sides = 0, 0, _UNIFIED, 0, source, 0, pitch, 0, 0, _UNIFIED, 0, to, 0, wide
        self._check(self._copy_2d(_Copy2D(*sides, width, height), stream), "cuMemcpy2DAsync")

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
