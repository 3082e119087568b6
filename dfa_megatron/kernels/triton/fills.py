"""All bits set in tensors if a flag is raised; else a look at the flag."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dfa_megatron.kernels.triton.support import launch, on_device_of

_BLOCK, _PROGRAMS = 1024, 64


@triton.jit
def _fill(x, nbytes, BLOCK: tl.constexpr):
    x = x.to(tl.pointer_type(tl.uint8), bitcast=True)
    for start in range(tl.program_id(0) * BLOCK, nbytes, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(x + at, tl.full((BLOCK,), 255, tl.uint8), mask=at < nbytes)


@triton.jit(do_not_specialize=("a_bytes", "b_bytes", "c_bytes"))
def _fill_if(flag, a, b, c, a_bytes, b_bytes, c_bytes, BLOCK: tl.constexpr):
    """Any number of programs, which share the bytes."""
    if tl.load(flag) != 0:
        _fill(a, a_bytes, BLOCK)
        _fill(b, b_bytes, BLOCK)
        _fill(c, c_bytes, BLOCK)


def fill_if(flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Set all bits of contiguous tensors if the flag, int32, is not 0."""
    with on_device_of(flag):
        for first in range(0, len(tensors), 3):
            given = [*tensors[first : first + 3], tensors[first], tensors[first]][:3]
            launch(_fill_if, (_PROGRAMS,), flag, *given, *[x.nbytes for x in given], BLOCK=_BLOCK)
