"""The garbage collector pauses while a pack is planned, and then is what it was before."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from dfa_megatron import DistAttentionConfig
from dfa_megatron.plan.uncollected import uncollected
from dfa_megatron.runtime.prepare import build
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.request import Request


def test_it_goes_on_after_the_last_block_an_error_too() -> None:
    with uncollected():
        with pytest.raises(ValueError, match="inside"), uncollected():
            raise ValueError("inside")
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled(), "it stays off where it was off"
    finally:
        gc.enable()
    with uncollected():
        if (child := os.fork()) == 0:
            os._exit(7 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, "it goes on in a fork"


def test_no_collection_runs_while_a_pack_is_planned() -> None:
    offsets = (0, *range(7, 4096, 61), 4096)
    request = Request(softmax_scale=0.1, causal=True, cu_seqlens=offsets, config=DistAttentionConfig(ulysses_degree=1))
    q, k, v = (torch.empty(1, 1024, heads, 16) for heads in (4, 2, 2))
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        build(request, 4, 1, Inputs(q, k, v))
    finally:
        gc.callbacks.remove(note)
    assert seen.count("start") <= 3  # before and after
    assert gc.isenabled()
