"""NaN and infinity come out where they must and nowhere else, and ranks that see nothing of others stay exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.dense import band_of, dense_attention
from tests.faults.harness import recorded
from tests.support.workers import run_ranks

RANKS, LOCAL, HEADS, DIM = 3, 8, 2, 8
LENGTH = RANKS * LOCAL
NUMBERS = {"NaN": math.nan, "inf": math.inf}
CASES = {
    f"{number} in {name} on {rank}": (number, name, rank)
    for at, number in enumerate(NUMBERS)
    for of, name in enumerate("qkv")
    for rank in ((at + of) % RANKS,)
} | {"NaN in v on 0": ("NaN", "v", 0), "inf in k on 1": ("inf", "k", 1)}
PACKS = {
    "a document for each rank": (0, 8, 16, 24),
    "documents of one token": tuple(range(LENGTH + 1)),
    "a document of the first rank, one of the others": (0, 8, 24),
}
WINDOWS = {"only itself": (0, 0), "one token before": (1, 0)}


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, LENGTH, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(4)]


def row_by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in which a row reads no key that it does not see: so that a NaN cannot spread by a zero."""
    rows = [dense_attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1])[0] for i in range(q.shape[1])]
    return torch.cat(rows, 1)


def dirty(case: str) -> tuple[list[torch.Tensor], int]:
    """q, k, v and dout with one number in the middle of a rank's tokens, and its token."""
    number, name, rank = CASES[case]
    tensors, token = inputs(), rank * LOCAL + 3
    tensors["qkv".index(name)][0, token, 1, 2] = NUMBERS[number]
    return tensors, token


def wrong(found: torch.Tensor, expected: torch.Tensor, *, infinite: bool = False) -> list[int]:
    """Tokens at which they differ; NaN is equal to NaN, and to infinity if asked: inf - inf depends on the order."""
    same = torch.isclose(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    if infinite:
        same |= ~found.isfinite() & ~expected.isfinite()
    return (~same).flatten(2).any(-1)[0].nonzero().flatten().tolist()


def attended(rank: int, whole: list[torch.Tensor], offsets: Any = None, **options: Any) -> list[torch.Tensor]:
    """Out and the gradients of a rank's tokens; of a pack with offsets."""
    *leaves, dout = (x[:, LOCAL * rank : LOCAL * (rank + 1)].clone() for x in whole)
    given = [leaf.requires_grad_()[0] if offsets else leaf.requires_grad_() for leaf in leaves]
    if offsets:
        out: Any = dfa_megatron.dist_flash_attn_varlen_func(*given, offsets, causal=True)[None]
    else:
        out = dfa_megatron.dist_flash_attn_func(*given, causal=True, **options)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _numbers(rank: int, ranks: int) -> dict[str, list[torch.Tensor]]:
    return {
        f"{case}, {schedule}": attended(rank, dirty(case)[0], config=DistAttentionConfig(schedule=schedule))
        for case in CASES
        for schedule in ("ring", "balanced")
    }


def _few(rank: int, ranks: int) -> dict[str, list[torch.Tensor]]:
    packs = {case: attended(rank, inputs(), offsets) for case, offsets in PACKS.items()}
    return packs | {case: attended(rank, inputs(), window_size=window) for case, window in WINDOWS.items()}


def whole(shards: list[dict[str, list[torch.Tensor]]], case: str) -> list[torch.Tensor]:
    return [torch.cat(parts, 1) for parts in zip(*(shard[case] for shard in shards), strict=True)]


@pytest.fixture(scope="module")
def numbers() -> list[dict[str, list[torch.Tensor]]]:
    return run_ranks(RANKS, _numbers, timeout=120)


@pytest.mark.fault
@pytest.mark.parametrize("schedule", ["ring", "balanced"])
@pytest.mark.parametrize("case", CASES)
def test_nan_and_infinity_come_out_where_they_must_and_nowhere_else(
    numbers: Any, case: str, schedule: str, record_property: Any
) -> None:
    (q, k, v, dout), token = dirty(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = row_by_row(*leaves)
    gradients = torch.autograd.grad(expected, leaves, dout)
    out, dq, dk, dv = whole(numbers, f"{case}, {schedule}")
    number, name, rank = CASES[case]
    # A kernel multiplies a whole block: a weight of 0 times v's NaN spreads it among the rows of the token's own rank.
    spread = range(LOCAL * rank, LOCAL * (rank + 1))
    allowed = {"v": {token: spread}}.get(name, {})
    assert set(wrong(out, expected.detach())) <= set(allowed.get(token, ())), "out"
    assert not torch.isfinite(expected[0, token]).all() or name == "k", "the number does come out"
    for label, found, exact in zip(("dq", "dk", "dv"), (dq, dk, dv), gradients, strict=True):
        elsewhere = set(wrong(found, exact, infinite=True)) - set(spread)
        assert not elsewhere, (label, sorted(elsewhere))
    sees = "comes out in the rows that see it; the rows of earlier ranks are exact"
    happens = sees if name != "q" else "comes out in its row; all other rows are exact"
    record_property("fault", recorded(f"{number} in {name}", "one token", rank, happens))


@pytest.fixture(scope="module")
def few() -> list[dict[str, list[torch.Tensor]]]:
    return run_ranks(RANKS, _few, timeout=60)


@pytest.mark.fault
@pytest.mark.parametrize("case", [*PACKS, *WINDOWS])
def test_ranks_that_see_nothing_of_others_are_exact(few: Any, case: str, record_property: Any) -> None:
    *leaves, dout = inputs()
    q, k, v = (x.requires_grad_() for x in leaves)
    if case in PACKS:
        bounds = torch.tensor(PACKS[case])
        document = torch.searchsorted(bounds, torch.arange(LENGTH), right=True)
        expected, _ = dense_attention(q, k, v, (document[:, None] == document).tril())
    else:
        expected, _ = dense_attention(q, k, v, band_of(True, WINDOWS[case]))
    exact = [expected.detach(), *torch.autograd.grad(expected, (q, k, v), dout)]
    for found, right in zip(whole(few, case), exact, strict=True):
        assert not wrong(found, right)
    kind = "pack" if case in PACKS else "window"
    where, happens = f"{kind}: {case}", "out and gradients are exact"
    record_property("fault", recorded("ranks that see nothing of others", where, None, happens))
