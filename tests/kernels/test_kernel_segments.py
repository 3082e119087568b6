"""Calls of several segments: every kernel against dense float64 attention, in one call or in a loop."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.kernels import BlockCall, Gradients, Partial, Saved
from dfa_megatron.kernels.adapters.cpu import MASK_ROWS, CpuKernel
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.segments import Rows, Segments
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Segment, Span
from dfa_megatron.plan.lowering.kernel_calls import Takes, by_window
from tests.support.kernel_cases import Case, every_dtype, every_target, problem, run, usable, visible
from tests.support.support_rows import in_bfloat16
from tests.support.support_rows import kernel as of_kernel


@dataclass(frozen=True)
class Pack:
    """What segments are drawn: their bands, their longest, how many rows are left between them, keys used again."""

    bands: tuple[Band, ...]
    longest: int = 40
    gap: int = 0
    again: bool = False
    square: bool = True
    count: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64

    def draw(self, seed: int) -> Segments:
        """Random segments, shrunk as plans have them."""
        draw = random.Random(seed)
        parts: list[Segment] = []
        q = kv = 0
        while len(parts) < self.count:
            q_len = draw.choice([1, draw.randint(1, self.longest), self.longest])
            kv_len = q_len if self.square else draw.randint(1, self.longest)
            band = draw.choice(self.bands)
            at = draw.randint(0, kv) if self.again else kv
            tile = Segment(q, q + q_len, at, at + kv_len, band).tile.shrink()
            if tile is not None:
                parts.append(Segment(tile.q.lo, tile.q.hi, tile.kv.lo, tile.kv.hi, tile.band))
                q, kv = tile.q.hi + draw.randint(0, self.gap), max(kv, tile.kv.hi + draw.randint(0, self.gap))
        return Segments(tuple(parts), q, kv)


PACKS = {
    "causal documents": Pack((CAUSAL,)),
    "full documents": Pack((FULL,), square=False),
    "long documents": Pack((CAUSAL,), longest=300, count=4, head_dim=128, heads=2, kv_heads=1),
    "single tokens": Pack((CAUSAL,), longest=1, count=30),
    "causal and full": Pack((CAUSAL, FULL), square=False),
    "gaps": Pack((CAUSAL,), gap=9),
    "gaps between all kinds": Pack((CAUSAL, FULL, Band(9, 0), Band(-1, 5)), gap=5, square=False),
    "keys again": Pack((FULL,), longest=90, again=True, square=False),
    "keys again and gaps": Pack((CAUSAL, FULL), gap=5, again=True, square=False, count=12),
    "windows": Pack((Band(9, 0),), longest=60),
    "windows of two sides": Pack((Band(7, 3),), longest=60, square=False),
    "wide windows": Pack((Band(12, 70),), longest=80, square=False),
}

every_pack = pytest.mark.parametrize("rows", PACKS)


def check_pack(
    name: str, device: str, dtype: torch.dtype, rows: str, *, deterministic: bool = False, batch: int = 1,
) -> None:  # fmt: skip
    pack = PACKS[rows]
    if pack.again and kernels.get(name).takes.kind != "window":
        pytest.skip(f"{name}: plans give keys again to kernels of windows alone")
    if interpreted():  # where a program takes half a second
        pack = replace(pack, heads=2, kv_heads=1, count=min(pack.count, 5))
    segments = pack.draw(zlib.crc32(f"{rows}{name}{dtype}".encode()))
    sizes = {"heads": pack.heads, "kv_heads": pack.kv_heads, "head_dim": pack.head_dim, "batch": batch}
    forms = [Case(s.q_hi - s.q_lo, s.kv_hi - s.kv_lo, s.band, **sizes) for s in segments.parts]
    kernel = usable(name, device, dtype, *forms, deterministic=deterministic)
    whole = Case(segments.q_len, segments.kv_len, **sizes)
    p = problem(whole, dtype, device, scale=0.8, segments=segments)
    for _ in range(2):  # the second time with what was derived the first time
        p.check(name, run(kernel, replace(p.call, deterministic=deterministic), p.dout))


@pytest.mark.support("kernels", in_bfloat16("several segments in a call"), of_kernel)
@every_target
@every_dtype
@every_pack
def test_a_call_of_several_segments_is_what_dense_float64_attention_says(
    name: str, device: str, dtype: torch.dtype, rows: str
) -> None:
    check_pack(name, device, dtype, rows)


@every_target
@pytest.mark.parametrize("rows", ["causal documents", "gaps between all kinds"])
def test_a_deterministic_backward_of_segments_is_right(name: str, device: str, rows: str) -> None:
    check_pack(name, device, torch.bfloat16, rows, deterministic=True)


def test_equal_windows_are_one_group_and_bounds_that_never_bind_do_not_matter() -> None:
    causal = Segment(0, 5, 0, 5, CAUSAL), Segment(5, 6, 5, 9, FULL), Segment(6, 16, 9, 19, CAUSAL)
    (launch,) = by_window(causal, 16, skips=False)
    assert launch.window == CAUSAL
    assert launch.segments == causal
    windows = Segment(0, 30, 0, 30, Band(7, 0)), Segment(30, 35, 30, 35, CAUSAL), Segment(35, 36, 35, 36, FULL)
    assert [launch.window for launch in by_window(windows, 36, skips=False)] == [Band(7, 0)]
    mixed = Segment(0, 4, 0, 4, CAUSAL), Segment(4, 8, 4, 9, FULL), Segment(8, 20, 9, 21, Band(3, 0))
    assert {launch.window for launch in by_window(mixed, 20, skips=False)} == {Band(3, 0), FULL}


class Windows(ReferenceKernel):
    """Takes segments of one window, as FlashAttention's varlen functions do."""

    takes = Takes("window")

    def launch(self, call: BlockCall) -> Partial:
        if call.segments.window is None:
            return super().launch(call)
        fresh = torch.full_like(call.q, math.nan), torch.full_like(call.q[..., 0].transpose(1, 2), math.nan)
        out, lse = (x for x in call.into or fresh if x is not None)
        for rows, one in self.each(call):
            out[:, rows], lse[:, :, rows] = super().launch(one)
        return out, lse

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        if call.segments.window is None:
            return super().launch_backward(call, dout, saved)
        (dq, *_), of_keys = call.into or (torch.full_like(call.q, math.nan),), []
        for rows, one in self.each(call):
            assert saved.minus_delta is not None
            its = Saved(saved.lse[:, :, rows], saved.minus_delta[:, :, rows])
            dq[:, rows], *more = super().launch_backward(one, dout[:, rows], its)
            of_keys.append(more)
        dk, dv = (torch.cat(x, 1) for x in zip(*of_keys, strict=True))
        return dq, dk, dv

    def each(self, call: BlockCall) -> Iterator[tuple[slice, BlockCall]]:
        _, keys, _ = call.segments.offsets(call.q.device)
        for s, lo, hi in zip(call.segments.parts, keys.tolist(), keys.tolist()[1:], strict=False):
            assert (s.kv_lo, s.kv_hi) == (lo, hi)
            k, v, one = call.k[:, lo:hi], call.v[:, lo:hi], Segments.one(s.band, s.q_hi - s.q_lo, hi - lo)
            yield slice(s.q_lo, s.q_hi), replace(call, q=call.q[:, s.q_lo : s.q_hi], k=k, v=v, segments=one)


@pytest.mark.parametrize("skips", [False, True], ids=["gathers rows", "skips rows"])
@pytest.mark.parametrize("bands", [(FULL,), (CAUSAL, FULL)])
def test_segments_of_one_window_may_have_keys_again_and_rows_between_them(
    bands: tuple[Band, ...], skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Windows, "takes", Takes("window", skips=skips))
    for seed, gap in itertools.product(range(4), (0, 5)):
        drawn = Pack(bands, gap=gap, again=True, square=False, longest=20, count=9).draw(seed)
        whole = Case(drawn.q_len, drawn.kv_len, FULL, batch=1, heads=4, kv_heads=2, head_dim=8)
        p = problem(whole, torch.float64, "cpu", segments=drawn)
        for _ in range(2):
            p.check("reference", run(Windows(), p.call, p.dout))


def test_a_band_is_cut_into_few_rows_on_a_cpu() -> None:
    tile = Segment(0, 5000, 0, 4000, Band(900, 40)).tile.shrink()
    assert tile is not None
    assert CpuKernel.takes.cut is not None
    assert max(len(part.q) for part in CpuKernel.takes.cut(tile)) <= MASK_ROWS


def test_as_many_copies_as_rows_are_not_all_rows() -> None:
    twice = Rows((Span(0, 2), Span(0, 2)), 4)
    assert not twice.is_all
    assert twice.take(torch.arange(4)[None]).tolist() == [[0, 1, 0, 1]]


class Counted(ReferenceKernel):
    """Says that it takes several segments in a launch, and counts launches."""

    takes = Takes("segments")

    def __init__(self) -> None:
        self.launches: list[int] = []

    def launch(self, call: BlockCall) -> Partial:
        self.launches.append(len(call.segments.parts))
        return super().launch(call) if len(call.segments.parts) == 1 else (call.q, call.q[..., 0].transpose(1, 2))


def test_a_batch_of_several_takes_a_launch_for_each_segment() -> None:
    kernel, segments = Counted(), PACKS["gaps"].draw(3)
    q, k = torch.randn(2, segments.q_len, 2, 8), torch.randn(2, segments.kv_len, 1, 8)
    kernel.forward(BlockCall(q[:1], k[:1], k[:1], segments, 0.3))
    assert kernel.launches == [len(segments.parts)]
    out, _ = kernel.forward(BlockCall(q, k, k, segments, 0.3))
    want, _ = dense_attention(q, k, k, visible=visible(segments, "cpu"), softmax_scale=0.3)
    assert kernel.launches[1:] == [1] * len(segments.parts)
    torch.testing.assert_close(out, want.float())
