"""How GPU kernels call their operators, seen without a GPU: through stand-ins that check and obey each argument.

Calls of packs tell kernels that other lengths will come: no kernel is compiled for a document that is short.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.adapters import aten, cudnn, flash4, flash4_launches
from dfa_megatron.kernels.adapters.aten import AtenFlashKernel
from dfa_megatron.kernels.adapters.cudnn import CudnnKernel
from dfa_megatron.kernels.adapters.flash4 import _BLOCKS, Flash4Kernel, _varlen
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Segment
from dfa_megatron.plan.language.mask import Mask, causal, documents
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.runtime.execute.memory import placed
from tests.support.close import assert_close
from tests.support.kernel_cases import as_layout
from tests.support.kernel_operators import StandIn
from tests.support.support_rows import kernel as of_kernel


class Named:
    """A stand-in in place of an `Operator`, which must be given exactly the arguments that it was looked up with."""

    def __init__(self, arguments: tuple[str, ...], function: Any) -> None:
        self.names, self.function = {name.split("|")[0] for name in arguments}, function

    def __call__(self, **a: Any) -> Any:
        assert set(a) == self.names
        return self.function(**a)


@pytest.fixture(
    params=[
        "flash4",
        "flash4, some heads at a time",
        "flash4, memory that comes late",
        "aten",
        "cudnn, lse of 4 dimensions",
        "cudnn, lse of 3 dimensions",
    ]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockKernel:
    """A GPU kernel over a stand-in of its operators."""
    name = request.param.partition(",")[0]
    stand_in = StandIn(name, 4 if "4 dimensions" in request.param else 3)
    functions = stand_in.forward, stand_in.backward
    if name == "flash4":
        if "heads" in request.param:
            monkeypatch.setattr(flash4, "_ACCUMULATORS", 64)
        if "late" in request.param:
            functions = stand_in.forward, late(stand_in.backward, monkeypatch)
        monkeypatch.setattr(flash4, "_functions", lambda: functions)
        return Flash4Kernel()
    module: Any = aten if name == "aten" else cudnn
    for attribute, function in zip(("_FORWARD", "_BACKWARD"), functions, strict=True):
        monkeypatch.setattr(module, attribute, Named(getattr(module, attribute).arguments, function))
    monkeypatch.setattr(aten, "_packs", lambda: True)
    monkeypatch.setattr(cudnn, "_lse_dimensions", lambda: stand_in.lse_dimensions)
    return AtenFlashKernel() if name == "aten" else CudnnKernel()


def late(backward: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backward that converts its gradients by launches, into memory that comes with each and goes with each."""
    module = SimpleNamespace(**{name: SimpleNamespace(compile_cache={}) for name in flash4_launches._LAUNCHING})
    monkeypatch.setattr(flash4_launches, "importlib", SimpleNamespace(import_module=lambda _: module))
    monkeypatch.setattr(flash4_launches, "_LARGE", 0)
    monkeypatch.setattr(flash4, "_version", lambda: flash4.READ)
    converting = module._bwd_postprocess_convert
    converting.compile_cache["any"] = lambda total, result: result.copy_(total)

    def converted(*, dq: torch.Tensor, dk: Any = None, dv: Any = None, **a: Any) -> Any:
        if dk is None:  # of a launch that skips rows
            return backward(dq=dq, **a)
        results, totals = (dq, dk, dv), [x.float() for x in backward(**a)]
        assert not any(map(flash4_launches.has_memory, results))
        for total, result in zip(totals, results, strict=True):
            converting.compile_cache["any"](total, result)
        assert not any(map(flash4_launches.has_memory, totals))
        return results

    return converted


def test_gradients_without_memory_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    late(None, monkeypatch)
    monkeypatch.setattr(flash4, "_functions", lambda: (None, lambda **a: (a["dq"], a["dk"], a["dv"])))
    q = torch.randn(1, 8, 2, 16).bfloat16()
    with pytest.raises(RuntimeError, match="has launched nothing that writes its gradients"):
        Flash4Kernel().backward(BlockCall.of(q, q, q, FULL, 0.3), q, Saved(*torch.randn(2, 1, 2, 8)))


def of_reference(call: BlockCall, dout: torch.Tensor) -> tuple[Saved, tuple[torch.Tensor, ...]]:
    """What a backward may read, out and delta both, and out, lse, dq, dk and dv."""
    out, lse = ReferenceKernel().forward(call)
    minus_delta = -(dout.float() * out.float()).sum(-1).transpose(1, 2)
    return Saved(lse, minus_delta, out), (out, lse, *ReferenceKernel().backward(call, dout, Saved(lse, minus_delta)))


def assert_gradients(got: Any, want: Any, dout: torch.Tensor) -> None:
    for name, g, w in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert g.shape == w.shape
        error = (g.float() - w.float()).norm() / max(w.float().norm(), dout.float().norm())
        assert error < 2e-3, f"{name} is off by {error}"


SIZES = [(24, 40), (40, 24), (24, 24), (1, 9), (9, 1), (1, 1), (90, 12), (90, 1)]
BANDS = [FULL, CAUSAL, Band(5, 2), Band(-1, 3), Band(7, -1), Band(-1, 85), Band(30, 85), Band(84, -1)]


PAIRS = [
    (size, band)
    for at, size in enumerate(SIZES)
    for of, band in enumerate(BANDS)
    if (at + of) % 2 == 0 or size in ((24, 24), (90, 12))
]
"""Each size with every second band, but those that the cuts of bands are for with all, and some drawn."""
DICE = random.Random(2)  # of some draws one number is rounded the other way
for _ in range(30):
    bounds = (DICE.choice([-1, DICE.randint(0, 60)]) for _ in range(2))
    PAIRS.append(((DICE.randint(20, 60), DICE.randint(1, 30)), Band(*bounds)))


@pytest.mark.support("kernels", "calls to stand-ins for its operators", of_kernel)
@pytest.mark.parametrize(("size", "band"), PAIRS, ids=str)
def test_gpu_kernels_give_their_operators_what_these_mean(
    kernel: BlockKernel, size: tuple[int, int], band: Band
) -> None:
    q_len, kv_len = size
    if kernel.name == "cudnn" and not band.is_full and not (band == CAUSAL and q_len == kv_len):
        pytest.skip("cudnn refuses bands")
    generator = torch.Generator().manual_seed(q_len * 100 + kv_len)

    def draw(length: int, heads: int) -> torch.Tensor:
        return torch.randn(2, length, heads, 16, generator=generator).bfloat16()

    q, k, v, dout = draw(q_len, 4), draw(kv_len, 2), draw(kv_len, 2), draw(q_len, 4)
    all_of, want = of_reference(BlockCall.of(q, k, v, band, 0.3), dout)
    plain, layout = (q, k, v, dout, want[0]), ("sbhd", "bhsd", "misaligned")[q_len % 3]
    for q_x, k_x, v_x, dout_x, out_x in (plain, [as_layout(x, layout) for x in plain]):
        call = BlockCall.of(q_x, k_x, v_x, band, 0.3)
        out, lse = kernel.forward(call)
        assert lse.shape == (2, 4, q_len)
        assert_close(out, want[0], tolerance=1e-4, name="out")
        assert_close(lse, want[1], tolerance=1e-6, name="lse")
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (want[1], all_of.minus_delta)]
        known = [Saved(strided[0], minus_delta=strided[1])] if kernel.backward_needs == "delta" else []
        if kernel.takes_out or not known:
            known.append(Saved(strided[0], out=out_x))
        for saved in known:
            assert_gradients(kernel.backward(call, dout_x, saved), want[2:], dout)


PACKS = {
    "causal": [(5, 5, CAUSAL), (1, 1, FULL), (30, 30, CAUSAL), (2, 2, CAUSAL)],
    "full": [(5, 9, FULL), (7, 1, FULL), (1, 30, FULL)],
    "single tokens": [(1, 1, FULL)] * 5,
    "mixed": [(5, 5, CAUSAL), (4, 9, FULL), (12, 12, Band(3, 0)), (6, 6, CAUSAL)],
    "windows": [(12, 12, Band(3, 0)), (3, 3, CAUSAL), (40, 40, Band(3, 0))],
    "tall windows": [(90, 12, Band(11, 80)), (8, 4, FULL)],
    "tall windows without a right bound": [(90, 12, Band(3, -1)), (8, 8, Band(3, -1))],
}


@pytest.mark.support("kernels", "calls to stand-ins for its operators", of_kernel)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("pack", PACKS)
def test_gpu_kernels_give_their_packed_operators_what_segments_mean(kernel: BlockKernel, pack: str, gap: int) -> None:
    parts, q_len, kv_len = [], 0, 0
    for rows, columns, band in PACKS[pack]:
        tile = Segment(q_len, q_len + rows, kv_len, kv_len + columns, band).tile.shrink()
        assert tile is not None
        parts.append(Segment(tile.q.lo, tile.q.hi, tile.kv.lo, tile.kv.hi, tile.band))
        q_len, kv_len = q_len + rows + gap, kv_len + columns + gap
    if kernel.name == "cudnn" and (pack == "mixed" or "windows" in pack):
        pytest.skip("cudnn refuses bands")
    segments = Segments(tuple(parts), q_len, kv_len)
    generator = torch.Generator().manual_seed(q_len)
    q, dout = (torch.randn(1, q_len, 4, 16, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, kv_len, 2, 16, generator=generator).bfloat16() for _ in range(2))
    call = BlockCall(q, k, v, segments, 0.3)
    all_of, want = of_reference(call, dout)
    for name, g, w in zip(("out", "lse"), kernel.forward(call), want[:2], strict=True):
        assert g.shape == w.shape
        assert_close(g, w, tolerance=1e-4, name=name)
    saved = replace(all_of, **{"out" if kernel.backward_needs == "delta" else "minus_delta": None})
    assert_gradients(kernel.backward(call, dout, saved), want[2:], dout)


def test_a_bound_that_never_binds_compiles_no_windowed_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    stand_in = StandIn("flash4")
    monkeypatch.setattr(flash4, "_functions", lambda: (lambda **a: given.append(a) or stand_in.forward(**a), None))
    q = torch.randn(1, 20, 2, 16).bfloat16()
    Flash4Kernel().forward(BlockCall.of(q, q, q, Band(100, 100), 0.3))
    Flash4Kernel().forward(BlockCall.of(q, q, q, Band(100, 0), 0.3))
    assert [(a["window_size_left"], a["window_size_right"]) for a in given] == [(None, None), (None, 0)]
    assert [a["causal"] for a in given] == [False, True]


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "passes"),
    [
        (8192, 32, 32, 1),
        (32768, 32, 32, 1),
        (32768, 32, 8, 1),
        (65536, 32, 32, 2),
        (65536, 33, 33, 1),
        (65536, 32, 8, 2),
        (131072, 32, 8, 4),
        (131072, 32, 1, 1),
    ],
)
def test_flash4s_backward_takes_some_heads_at_a_time_where_its_accumulators_are_large(
    rows: int, heads: int, kv_heads: int, passes: int
) -> None:
    q, k = (torch.empty(1, rows, count, 128, device="meta") for count in (heads, kv_heads))
    assert flash4._passes(q, k) == passes


def two() -> Segments:
    return Segments((Segment(0, 20, 0, 20, CAUSAL), Segment(20, 48, 20, 48, CAUSAL)), 48, 48)


def one(band: Band) -> Callable[[], Segments]:
    return lambda: Segments.one(band, 48, 48)


@pytest.mark.parametrize(
    ("kernel_class", "segments"),
    [*itertools.product((AtenFlashKernel, CudnnKernel), (one(FULL), one(CAUSAL))), (AtenFlashKernel, two)],
)
def test_the_real_operators_take_the_call(kernel_class: type[BlockKernel], segments: Callable[[], Segments]) -> None:
    """On the meta device: names, types and shapes of arguments and results, in the PyTorch at hand."""
    batch = 1 if segments is two else 2
    q, k = (torch.empty(batch, 48, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    call = BlockCall(q, k, k, segments(), 0.1)
    out, lse = kernel_class().forward(call)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (batch, 4, 48), torch.float32)
    gradients = kernel_class().backward(call, q, Saved(lse=lse, out=out))
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_an_operator_that_pads_its_lse_is_called_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn("aten")
    monkeypatch.setattr(aten, "_FORWARD", stand_in.forward)
    monkeypatch.setattr(aten, "_BACKWARD", stand_in.backward)
    monkeypatch.setattr(aten, "_packs", lambda: False)
    seeded = torch.Generator().manual_seed(0)  # of some draws one number is rounded the other way: 2e-4
    q = torch.randn(1, 48, 2, 16, generator=seeded).bfloat16()
    call = BlockCall(q, q, q, two(), 0.3)
    out, lse = AtenFlashKernel().forward(call)
    assert_close(out, ReferenceKernel().forward(call)[0], tolerance=1e-4)
    gradients = AtenFlashKernel().backward(call, q, Saved(lse, out=out))
    assert [g.shape for g in gradients] == [q.shape] * 3
    assert stand_in.launches == []


FORM = Sizes(1, 2, 1, 8, 8, "bfloat16", "delta")


def launched(mask: Mask, ranks: int) -> Iterator[Segments]:
    """Yield what flash4 launches for a mask, on every rank, forward and backward."""
    kernel = Flash4Kernel()
    for phase in make_plan(mask, ranks, schedule="balanced").phases:
        for rank in range(ranks):
            memory = placed(phase, rank, FORM, kernel.takes_of(1, 2))
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
