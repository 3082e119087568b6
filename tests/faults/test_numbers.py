"""NaN and infinity come out where they must and nowhere else, and ranks that see nothing of others stay exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.dense import dense_attention
from tests.faults.training import recorded
from tests.support.attend import case, compare, pack
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


def attended(rank: int, whole: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Out and the gradients of a rank's tokens."""
    *leaves, dout = (x[:, LOCAL * rank : LOCAL * (rank + 1)].clone() for x in whole)
    out: Any = dfa_megatron.dist_flash_attn_func(*(x.requires_grad_() for x in leaves), causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _numbers(rank: int, ranks: int) -> dict[str, list[torch.Tensor]]:
    return {
        f"{case}, {schedule}": attended(rank, dirty(case)[0], config=DistAttentionConfig(schedule=schedule))
        for case in CASES
        for schedule in ("ring", "balanced")
    }


def _few(rank: int, ranks: int) -> None:
    for offsets in PACKS.values():
        compare(pack(offsets, heads=HEADS, kv_heads=HEADS, head_dim=DIM), rank, ranks)
    for window in WINDOWS.values():
        seen = case(LENGTH, batch=1, heads=HEADS, kv_heads=HEADS, head_dim=DIM, window_size=window)
        compare(seen, rank, ranks)


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
def few() -> None:
    run_ranks(RANKS, _few, timeout=60)


@pytest.mark.fault
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seen", [*PACKS, *WINDOWS])
def test_ranks_that_see_nothing_of_others_are_exact(seen: str, record_property: Any) -> None:
    where, happens = f"{'pack' if seen in PACKS else 'window'}: {seen}", "out and gradients are exact"
    record_property("fault", recorded("ranks that see nothing of others", where, None, happens))
