"""ALiBi's bias: every kernel that can, against dense float64 attention with its gradient, and who takes it."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, replace

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import Alibi, BlockCall, BlockKernel, Need, accumulator_dtype
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Segment
from tests.support.close import assert_close
from tests.support.kernel_cases import COARSE, ROUND_ONCE, TARGETS, TOLERANCE, Case, every_dtype, run, usable
from tests.support.support_rows import in_bfloat16
from tests.support.support_rows import kernel as of_kernel

BIASING = [(name, device) for name, device in TARGETS if kernels.get(name).adds_alibi]
every_biasing = pytest.mark.parametrize(
    ("name", "device"), BIASING, ids=[f"{name} on {device}" for name, device in BIASING]
)
CASES = {
    "causal": Case(129, 129, CAUSAL, heads=4, kv_heads=2, head_dim=64, batch=1),
    "full": Case(40, 72),
    "window": Case(80, 48, Band(20, 4), heads=4, kv_heads=1),
    "wide heads": Case(130, 130, CAUSAL, heads=2, kv_heads=1, head_dim=256, batch=1),
}


def in_order(q_len: int, kv_len: int) -> tuple[list[int], list[int]]:
    """The tokens of rows of one stretch, aligned to the bottom right."""
    return [kv_len - q_len + 500 + i for i in range(q_len)], [500 + j for j in range(kv_len)]


def apart(q_len: int, kv_len: int) -> tuple[list[int], list[int]]:
    """Rows as a fused call has them: neighbours in memory, and tokens of stretches that lie apart."""
    q = [(20 if i < q_len // 3 else 90) + i for i in range(q_len)]
    kv = [(3 if j < kv_len // 2 else 60) + j for j in range(kv_len)]
    return q, kv


POSITIONS = {"in order": in_order, "apart": apart}


@dataclass
class Problem:
    """A call in a dtype, and what float64 makes of exactly its inputs; results in the order of `NAMES`."""

    kernel: BlockKernel
    call: BlockCall
    dout: torch.Tensor
    want: tuple[torch.Tensor, ...]
    largest: float

    def check(self, got: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
        """Relative norms; a score is rounded to the accumulator, so that a large bias costs as much as it is large."""
        exact = self.kernel.name in ROUND_ONCE or dtype not in COARSE
        limits = (TOLERANCE[dtype],) * 2 if exact else COARSE[dtype]
        rounding = 2 * torch.finfo(accumulator_dtype(dtype)).eps * self.largest
        lse = 1e-12 if dtype == torch.float64 else 1e-5
        limits = (limits[0] + rounding, lse, *(limits[1] + 2 * rounding,) * 3)
        for label, g, w, tolerance in zip(NAMES, got, self.want, limits, strict=True):
            assert g.dtype == (accumulator_dtype(dtype) if label == "lse" else dtype), label
            assert_close(g, w, tolerance=tolerance, name=label)


NAMES = ("out", "lse", "dq", "dk", "dv")


def bias_of(slopes: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """(heads, q_len, kv_len), as the definition says, in float64."""
    distance = (q[:, None].double() - kv[None, :].double()).abs()
    return -slopes.double()[:, None, None] * distance


def problem(
    name: str,
    device: str,
    dtype: torch.dtype,
    case: Case,
    rows: tuple[list[int], list[int]],
    *,
    softcap: float = 0.0,
    segments: Segments | None = None,
    visible: torch.Tensor | None = None,
) -> Problem:
    kernel = usable(name, device, dtype, case)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}{dtype}{softcap}{rows}".encode()))

    def draw(length: int, heads: int) -> torch.Tensor:
        values = torch.randn(case.batch, length, heads, case.head_dim, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(device)

    q, dout = draw(case.q_len, case.heads), draw(case.q_len, case.heads)
    k, v = draw(case.kv_len, case.kv_heads), draw(case.kv_len, case.kv_heads)
    slopes = (torch.rand(case.heads, generator=generator) * 0.4 + 0.01).to(device)
    positions = [torch.tensor(x, dtype=torch.int32, device=device) for x in rows]
    bias = bias_of(slopes, *positions)
    scale = 1.2 / math.sqrt(case.head_dim)
    exact = tuple(x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    sees = case.band if visible is None else visible
    out, lse = dense_attention(*exact, sees, softmax_scale=scale, softcap=softcap, bias=bias)
    gradients = torch.autograd.grad(out, exact, dout.double())
    segments = segments or Segments.one(case.band, case.q_len, case.kv_len)
    call = BlockCall(q, k, v, segments, scale, softcap, Alibi(slopes, *positions))
    return Problem(kernel, call, dout, (out.detach(), lse.detach(), *gradients), bias.abs().max().item())


@pytest.mark.support("kernels", in_bfloat16("ALiBi"), of_kernel)
@every_biasing
@every_dtype
@pytest.mark.parametrize("rows", CASES)
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_block_with_alibi_is_exact(
    name: str, device: str, dtype: torch.dtype, rows: str, where: str, softcap: float
) -> None:
    case = CASES[rows]
    p = problem(name, device, dtype, case, POSITIONS[where](case.q_len, case.kv_len), softcap=softcap)
    p.check(run(p.kernel, p.call, p.dout), dtype)


@every_biasing
def test_a_bias_is_the_same_however_late_in_the_sequence(name: str, device: str) -> None:
    case = CASES["causal"]
    rows = apart(case.q_len, case.kv_len)
    p = problem(name, device, torch.float32, case, rows)
    alibi = p.call.alibi
    assert alibi is not None
    late = replace(alibi, q_positions=alibi.q_positions + 2**30, kv_positions=alibi.kv_positions + 2**30)
    results = (run(p.kernel, call, p.dout) for call in (p.call, replace(p.call, alibi=late)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def segments_with_gaps(draw: random.Random) -> Segments:
    """Bands of every kind, with rows of no segment between them."""
    parts, q, kv = [], 0, 0
    for band in (CAUSAL, FULL, Band(9, 0), Band(4, 3), CAUSAL):
        q_len = draw.randint(1, 40)
        kv_len = q_len if band != FULL else draw.randint(1, 40)
        tile = Segment(q, q + q_len, kv, kv + kv_len, band).tile.shrink()
        assert tile is not None
        parts.append(Segment(tile.q.lo, tile.q.hi, tile.kv.lo, tile.kv.hi, tile.band))
        q, kv = q + q_len + draw.randint(0, 3), kv + kv_len + draw.randint(0, 3)
    return Segments(tuple(parts), parts[-1].q_hi, parts[-1].kv_hi)


@every_biasing
@every_dtype
@pytest.mark.parametrize("batch", [1, 2], ids=["one launch", "a loop"])
def test_segments_have_the_distances_of_their_own_rows(name: str, device: str, dtype: torch.dtype, batch: int) -> None:
    segments = segments_with_gaps(random.Random(f"{dtype} {batch}"))
    case = Case(segments.q_len, segments.kv_len, heads=4, kv_heads=2, batch=batch)
    usable(name, device, dtype, case)
    visible = torch.zeros(case.q_len, case.kv_len, dtype=torch.bool, device=device)
    i, j = torch.arange(case.q_len, device=device)[:, None], torch.arange(case.kv_len, device=device)[None, :]
    for s in segments.parts:
        tile = s.tile
        inside = (i >= tile.q.lo) & (i < tile.q.hi) & (j >= tile.kv.lo) & (j < tile.kv.hi)
        visible |= inside & (j - i >= tile.lo) & (j - i <= tile.hi)
    p = problem(name, device, dtype, case, apart(case.q_len, case.kv_len), segments=segments, visible=visible)
    p.check(run(p.kernel, p.call, p.dout), dtype)


NEED = Need("cpu", torch.float32, 2, 2, 32, 32, frozenset({"causal"}), alibi=True)


@pytest.mark.support("kernels", "ALiBi", "`cpu`", refuses=True)
@pytest.mark.support("kernels", "ALiBi", "`aten`", refuses=True)
@pytest.mark.support("kernels", "ALiBi", "`cudnn`", refuses=True)
@pytest.mark.support("kernels", "ALiBi", "`flash4`", refuses=True)
@pytest.mark.support("kernels", "ALiBi", "`flash3`", refuses=True)
@pytest.mark.support("kernels", "ALiBi", "`flash2`", refuses=True)
def test_kernels_without_alibi_refuse_and_name_those_that_can() -> None:
    with pytest.raises(UnsupportedError, match=r"ALiBi.*it adds no ALiBi bias by global positions.*'reference'"):
        kernels.select("cpu", NEED)
    for name in ("flash4", "cudnn", "aten", "flash2", "flash3", "cpu"):
        assert kernels.refusal(kernels.get(name), NEED) == "it adds no ALiBi bias by global positions"


def test_auto_takes_the_first_kernel_with_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "cudnn", "flash4"):
        monkeypatch.setattr(type(kernels.get(name)), "refusal", lambda self, need: None)
        assert kernels.select("auto", NEED).name == "triton"
