"""Calls of packs tell kernels that other lengths will come: no kernel is compiled for a document that is short."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from dfa_megatron.kernels.adapters import flash4
from dfa_megatron.kernels.adapters.flash4 import _BLOCKS, Flash4Kernel, _varlen
from dfa_megatron.kernels.api import BlockCall, Saved
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import FULL
from dfa_megatron.plan.language.mask import Mask, causal, documents
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.schedules import plan_named
from dfa_megatron.runtime.execute.memory import placed
from tests.kernels.test_kernel_gpu_calls import of_reference
from tests.support.close import assert_close
from tests.support.kernel_operators import StandIn

FORM = Sizes(1, 2, 1, 8, 8, "bfloat16", "delta")


def launched(mask: Mask, ranks: int) -> Iterator[Segments]:
    """Yield what flash4 launches for a mask, on every rank, forward and backward."""
    kernel = Flash4Kernel()
    for phase in plan_named("balanced", mask, ranks).phases:
        for rank in range(ranks):
            memory = placed(phase, rank, FORM, kernel.launching(batch=1, group=2, bands=True))
            for segments in (one for step in memory.segments for one in step):
                assert segments.split is not None
                for part in segments.split.parts:
                    q, k = (torch.empty(1, n, 1, 8, device="meta") for n in (part.segments.q_len, part.segments.kv_len))
                    yield _varlen(BlockCall(q, k, k, part.segments, 1.0)).segments


def test_short_documents_of_packs_are_launched_as_packs() -> None:
    draw, short = random.Random(7), 0
    for _ in range(20):
        lengths = [draw.randrange(1, 1200) for _ in range(8)]
        lengths.append(-sum(lengths) % 4 + 1200)
        for one in launched(documents(lengths), 4):
            assert one.window is not None or min(one.q_len, one.kv_len) >= _BLOCKS
            short += len(one.parts) == 1 and one.window is not None
    assert short > 20, "or this test shows nothing"


def test_a_sequence_that_is_one_document_needs_no_tables() -> None:
    assert all(one.window is None for one in launched(causal(64), 4))


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "ragged", "varlen"),
    [(20, 20, 1, True, True), (600, 20, 1, True, True), (600, 600, 1, True, False), (20, 20, 1, False, False),
     (20, 20, 2, True, False)],
)  # fmt: skip
def test_a_short_document_alone_compiles_no_kernel_of_its_own(
    rows: int, columns: int, batch: int, ragged: bool, varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    stand_in = StandIn("flash4")

    def seen(function: Callable[..., Any], **arguments: Any) -> Any:
        given.append("cu_seqlens_q" in arguments)
        return function(**arguments)

    monkeypatch.setattr(
        flash4, "_functions", lambda: (partial(seen, stand_in.forward), partial(seen, stand_in.backward))
    )
    q, dout = (torch.randn(batch, rows, 4, 16).bfloat16() for _ in range(2))
    k, v = (torch.randn(batch, columns, 2, 16).bfloat16() for _ in range(2))
    call = BlockCall(q, k, v, Segments.one(FULL, rows, columns, ragged=ragged), 0.3)
    all_of, want = of_reference(call, dout)
    kernel = Flash4Kernel()
    got = (*kernel.forward(call), *kernel.backward(call, dout, Saved(all_of.lse, all_of.minus_delta)))
    assert given == [varlen, varlen]
    for name, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape
        assert_close(g.float(), w.float(), tolerance=2e-2, name=name)
