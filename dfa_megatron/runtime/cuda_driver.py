"""CUDA driver calls that PyTorch does not offer: copies and flags on a stream, and a thread's capture mode."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ"""
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


class Driver:
    """Calls of libcuda: none of them takes a multiprocessor, and none makes the host wait.

    Raises:
        OSError: there is no driver, or it is older than CUDA 11.7.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._error = library.cuGetErrorString
        self._copy = self._function(library, "cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, None)
        flag = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
        self._write = self._function(library, "cuStreamWriteValue32_v2", None, *flag)
        self._wait = self._function(library, "cuStreamWaitValue32_v2", None, *flag)

        self._capture_mode = self._function(library, "cuThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int))

    def relax_captures(self) -> None:
        """Let this thread query events while another one captures a graph."""
        self._check(self._capture_mode(ctypes.byref(ctypes.c_int(_RELAXED))), "cuThreadExchangeStreamCaptureMode")

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> ctypes._NamedFuncPointer:
        """Look a function up; None among the arguments is a stream's handle."""
        try:
            function: ctypes._NamedFuncPointer = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"the CUDA driver has no {name}") from error
        function.argtypes = [ctypes.c_void_p if kind is None else kind for kind in arguments]
        function.restype = ctypes.c_int
        return function

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between device addresses; between two GPUs a copy engine runs it."""
        self._check(self._copy(to, source, nbytes, stream), "cuMemcpyAsync")

    def write(self, stream: int, address: int, value: int) -> None:
        """Queue a 32-bit write that becomes visible after everything queued before."""
        self._check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the 32-bit word at an address of its own GPU has that value."""
        self._check(self._wait(stream, address, value, _EQUAL), "cuStreamWaitValue32")

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._error(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed with code {code}: {(text.value or b'?').decode()}")


@functools.cache
def driver() -> Driver:
    """Return the process's driver."""
    return Driver()
