"""What a causal run and a new pack enter on one of two ranks: files, and lines of functions. Both may only fall."""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import attention
from tests.support import house
from tests.support.workers import run_ranks

MOST = {"causal": (43, 3330), "pack": (46, 3565)}
"""A little more lines than with PyTorch 2.13: of these a first forward enters 40 files, and one of a new pack 40."""


def _walk(rank: int, ranks: int, name: str) -> tuple[int, int]:
    """Walk a first, a recorded and a replayed call with their backwards; of packs a new one each time."""
    ours, entered = f"{house.ROOT}/{house.PACKAGE}/", set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(ours):
            entered.add(code)

    assert attention.dist_flash_attn_func is dfa_megatron.dist_flash_attn_func, "loaded before the walk"
    for number in range(3):
        q, k, v = (torch.randn(1, 128, 4, 32, requires_grad=True) for _ in range(3))
        sys.setprofile(note)
        try:
            if name == "causal":
                out = dfa_megatron.dist_flash_attn_func(q, k, v, causal=True)
            else:
                cu_seqlens = (0, 64 + number, 160 + number, 128 * ranks)
                out = dfa_megatron.dist_flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, causal=True)
            out.sum().backward()  # type: ignore[union-attr]
        finally:
            sys.setprofile(None)
    lines = {(code.co_filename, line) for code in entered for *_, line in code.co_lines() if line}
    return len({code.co_filename for code in entered}), len(lines)


@pytest.mark.parametrize("name", MOST)
def test_a_run_enters_no_more_than_now(name: str) -> None:
    files, lines = run_ranks(2, _walk, name)[0]
    assert files <= MOST[name][0]
    assert lines <= MOST[name][1]
