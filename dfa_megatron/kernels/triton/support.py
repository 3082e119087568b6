"""Whether Triton can be used here, its interpreter included, and facts about the device it runs on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dfa_megatron.kernels.current_stream import interpreted as interpreted
from dfa_megatron.kernels.current_stream import stream_of
from dfa_megatron.kernels.tape import recording

OLDEST = (3, 2)

FUSED: dict[str, Any] = {} if "TRITON_DEFAULT_FP_FUSION" in os.environ else {"enable_fp_fusion": True}
"""A product and a sum are one operation, where nobody says otherwise: Triton's own default changes with 3.10."""


@functools.cache
def triton_refusal() -> str | None:
    """Return why no Triton kernel can be compiled here, with the version found, or None."""
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
    """Make the tensor's device the current one, on which Triton launches; do nothing where it is already."""
    return torch.cuda.device_of(x) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel on the current stream; a replay calls what was compiled, without looking it up.

    args: in the order of the kernel's parameters. constants: the others, and options such as num_warps.
    """
    constants = FUSED | constants
    compiled = kernel[grid](*args, **constants)
    tape = recording()
    if tape is None:
        return
    if compiled is None or not _takes_constants():
        tape.launch(functools.partial(kernel[grid], **constants), *args)
    else:
        others = (constants[name] for name in kernel.arg_names[len(args) :])
        # A replay is on the recorded stream: Triton need not look it up.
        run = functools.partial(compiled[(*grid, 1, 1)[:3]], stream=stream_of(args[0].device))
        tape.launch(run, *args, *others)


def _takes_constants() -> bool:
    """Return whether a compiled kernel is called with all parameters; before Triton 3.3 constants were left out."""
    version: str = importlib.import_module("triton").__version__
    return tuple(int(part) for part in version.split(".")[:2]) >= (3, 3)


def multiprocessors(device: torch.device) -> int:
    """Return how many programs of a kernel run at a time, at least; 1 on CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def large_shared_memory(device: torch.device) -> bool:
    """Return whether a block may have over 200 KiB of shared memory: Hopper, and Blackwell but its consumer chips."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10, 11)


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x with its strides, or a contiguous copy where the last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
