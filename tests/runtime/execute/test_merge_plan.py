"""Accumulators: whatever rows come in whatever order, every row ends as the merge of its partials."""

from __future__ import annotations

import random

import pytest
import torch

from dfa_megatron.plan.interpret import Accumulator
from dfa_megatron.plan.language.program import Destination, Region
from dfa_megatron.plan.lowering.lower import MOST_PARTS, Write, merges_of
from dfa_megatron.runtime.execute.memory import Field, Fields
from dfa_megatron.runtime.execute.tensors import TensorMemory
from tests.support.close import assert_close

ROWS = 12


def draw_writes(draw: random.Random) -> list[Write]:
    writes = []
    for _ in range(draw.randint(1, 9)):
        lo, hi = sorted(draw.sample(range(ROWS + 1), 2))
        if draw.random() < 0.4:
            lo, hi = 0, ROWS
        writes.append(Write(Region(0, "dq", lo, hi), draw.random() < 0.7))
    return writes


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize(
    ("result", "came"), [(torch.float64, torch.float64), (torch.float32, torch.float64), (torch.float32, torch.float32)]
)
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_the_sum_of_its_partials(seed: int, result: torch.dtype, came: torch.dtype) -> None:
    draw = random.Random(seed)
    writes = draw_writes(draw)
    merges = merges_of(ROWS, writes)
    fields = (Field("dk", 2, 4, torch.float64), Field("dv", 2, 8, torch.float64))
    results = (Field("dk", 2, 4, result), Field("dv", 2, 8, result))
    accumulators = [
        Accumulator(merges, ROWS, TensorMemory(2, fields[one], results[one], torch.device("cpu")))
        for one in (slice(0, 1), slice(1, 2))
    ]
    want = [torch.zeros(2, ROWS, 2, width, dtype=torch.float64) for width in (4, 8)]
    generator = torch.Generator().manual_seed(seed)
    for merging in merges.writes:
        for part in merging.rows:
            assert len(part.saved) + part.sum + 1 <= MOST_PARTS
            assert part.into is not Destination.SAVED or not (part.saved or part.sum)
    for region, keepable, _ in writes:
        lo, hi = region.lo, region.hi
        partial = tuple(torch.randn(2, hi - lo, 2, w, generator=generator, dtype=came) for w in (4, 8))
        for total, x in zip(want, partial, strict=True):
            total[:, lo:hi] += x
        for accumulator, x in zip(accumulators, partial, strict=True):
            accumulator.write((x,))
        if not keepable:  # its memory is used again
            for x in partial:
                x.fill_(float("nan"))
    for (got,), total in zip([one.result() for one in accumulators], want, strict=True):
        assert got.dtype == result
        assert_close(got, total, tolerance=1e-14 if result == torch.float64 else 1e-6)
    assert not any(one._saved for one in accumulators)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("came", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_the_merge_of_its_partials(seed: int, came: torch.dtype) -> None:
    writes = draw_writes(random.Random(seed))
    sums = (Field("out", 2, 4, torch.float64), Field("lse", 2, 0, torch.float64))
    results = (Field("out", 2, 4, came), sums[1])
    merges = merges_of(ROWS, writes)
    accumulator = Accumulator(merges, ROWS, TensorMemory(2, sums, results, torch.device("cpu")))
    weight, total = torch.zeros(2, ROWS, 2, 1, dtype=torch.float64), torch.zeros(2, ROWS, 2, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for region, keepable, _ in writes:
        lo, hi = region.lo, region.hi
        out = torch.randn(2, hi - lo, 2, 4, generator=generator, dtype=came)
        lse = torch.randn(2, 2, hi - lo, generator=generator, dtype=torch.float64)
        share = lse.exp().transpose(1, 2).unsqueeze(-1)
        weight[:, lo:hi] += share
        total[:, lo:hi] += share * out
        accumulator.write((out, lse))
        if not keepable:  # its memory is used again
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
    out, lse = accumulator.result()
    seen = weight > 0
    assert_close(out, torch.where(seen, total / weight, 0.0), tolerance=1e-14 if came == torch.float64 else 1e-6)
    assert torch.allclose(lse.exp(), weight.squeeze(-1).transpose(1, 2), rtol=1e-12)


FLOAT32, FLOAT64 = (Field("dq", 2, 4, torch.float32),), (Field("dq", 2, 4, torch.float64),)


def merged(writes: list[tuple[int, int]], partials: list[torch.Tensor], *, landed: int = 0) -> Accumulator[Fields]:
    """An accumulator of float32 after these writes, the last `landed` of which came from another rank."""
    of = [Write(Region(0, "dq", lo, hi), at < len(writes) - landed) for at, (lo, hi) in enumerate(writes)]
    merges = merges_of(ROWS, of)
    accumulator = Accumulator(merges, ROWS, TensorMemory(1, FLOAT64, FLOAT32, torch.device("cpu")))
    for partial in partials:
        accumulator.write((partial,))
    return accumulator


def ones(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(1, rows, 2, 4, dtype=dtype)


def test_the_result_takes_the_memory_of_a_partial_of_all_rows() -> None:
    half, whole = ones(ROWS // 2), ones(ROWS)
    (result,) = merged([(0, ROWS // 2), (0, ROWS), (0, ROWS)], [half, whole, ones(ROWS)]).result()
    assert result.data_ptr() == whole.data_ptr()
    assert result[0, :, 0, 0].tolist() == [3.0] * (ROWS // 2) + [2.0] * (ROWS // 2)


@pytest.mark.parametrize("first", [ones(ROWS, torch.float64), ones(1).expand(1, ROWS, 2, 4)])
def test_the_result_takes_no_memory_that_is_unlike_it(first: torch.Tensor) -> None:
    (result,) = merged([(0, ROWS)] * 2, [first, ones(ROWS)]).result()
    assert result.is_contiguous()
    assert (first == 1).all()
    assert (result == 2).all()


def test_rows_of_a_partial_that_becomes_the_result_are_not_copied() -> None:
    whole, some = ones(ROWS), ones(4)
    accumulator = merged([(0, ROWS), (4, 8)], [whole, some])
    assert accumulator.result()[0] is whole
    assert whole[0, :, 0, 0].tolist() == [1.0] * 4 + [2.0] * 4 + [1.0] * 4
    landed = ones(ROWS)
    assert merged([(0, ROWS)], [landed], landed=1).result()[0] is not landed, "landed memory is used again"
