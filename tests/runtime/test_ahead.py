"""Packs that are planned ahead, in data-loader workers: the same results, and nothing is planned in the loop."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.pack_planner import PackPlanner
from dfa_megatron.runtime import rank_plan
from dfa_megatron.runtime.rank_plan import RankPlan
from tests.support.arguments import arguments
from tests.support.attend import compare, pack
from tests.support.packs import random_offsets
from tests.support.workers import run_ranks

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "device": "cpu"}
TOKENS = 24


@dataclass(frozen=True)
class Collate:
    """What a data loader's worker does with the documents of a pack."""

    planners: tuple[PackPlanner, ...]

    def __call__(self, packs: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], list[RankPlan]]:
        (offsets,) = packs
        return offsets, [planner(offsets) for planner in self.planners]


def attend_and_compare(rank: int, ranks: int, offsets: tuple[int, ...], dtype: torch.dtype, **options: Any) -> None:
    window = options.get("window_size", (-1, -1))
    compare(pack(offsets, head_dim=32, dtype=dtype, seed=len(offsets), window_size=window), rank, ranks, **options)


def _loop(rank: int, ranks: int, options: dict[str, Any]) -> int:
    """Train over a loader; returns how often a pack was planned in this process."""
    multiprocessing.current_process()._config["daemon"] = False  # a loader's workers are processes of their own
    draw = random.Random(ranks)
    packs = [random_offsets(ranks * TOKENS, draw) for _ in range(2)]
    kinds: list[dict[str, Any]] = [options, options | {"window_size": (5, 0)}]
    planners = tuple(PackPlanner(TOKENS, **arguments(dtype=torch.float64, **SHAPE, **kind)) for kind in kinds)
    for offsets, plans in DataLoader(packs, batch_size=1, num_workers=1, collate_fn=Collate(planners)):
        for plan in plans:
            plan.use()
        for kind in kinds:
            attend_and_compare(rank, ranks, offsets, torch.float64, **kind)
    return rank_plan.planned.cache_info().misses


@pytest.mark.support("runtime", "packs planned ahead by data-loader workers")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"layout": "load_balanced"}),
        (4, {"ulysses_degree": 2, "schedule": "greedy"}),
    ],
)
def test_a_pack_that_a_worker_has_planned_is_not_planned_in_the_loop(ranks: int, options: dict[str, Any]) -> None:
    assert run_ranks(ranks, _loop, options, timeout=170) == [0] * ranks


def _other_dtype(rank: int, ranks: int) -> list[str]:
    """Calls in another dtype than was planned for; returns the warnings."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dfa_megatron.runtime.rank_plan").addHandler(handler)
    planner = PackPlanner(TOKENS, **arguments(dtype=torch.float16, **SHAPE))
    for offsets in ((0, 7, ranks * TOKENS), (0, 30, ranks * TOKENS)):
        planner(offsets).use()
        attend_and_compare(rank, ranks, offsets, torch.bfloat16)
    return heard


def test_a_plan_for_other_tensors_is_not_taken_and_that_is_said_once() -> None:
    for heard in run_ranks(2, _other_dtype):
        assert len(heard) == 1
        assert "float16" in heard[0]
        assert "bfloat16" in heard[0]


def test_plans_that_nobody_asks_for_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_plan, "_KEPT", 3)
    monkeypatch.setattr(rank_plan, "_ahead", type(rank_plan._ahead)())
    planner = PackPlanner(TOKENS, **arguments(dtype=torch.float32, **SHAPE))
    for end in range(1, 9):
        planner((0, end, TOKENS)).use()
    assert [problem.asks.cu_seqlens[1] for problem, _ in rank_plan._ahead] == [6, 7, 8]


def test_what_cannot_be_planned_is_said_where_it_is_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="ulysses_degree=2"):
        PackPlanner(TOKENS, **arguments(ulysses_degree=2, **SHAPE))
    with pytest.raises(UnsupportedError, match="must increase"):
        PackPlanner(TOKENS, **arguments(**SHAPE))((0, 9, 9, TOKENS))
    with pytest.raises(UnsupportedError, match="hold 24 tokens together"):
        PackPlanner(TOKENS, **arguments(**SHAPE))((0, 9, 2 * TOKENS))
    with pytest.raises(UnsupportedError, match="flash4"):
        PackPlanner(TOKENS, **arguments(kernel="flash4", **SHAPE))((0, 9, TOKENS))
    with pytest.raises(TypeError, match="widnow"):
        PackPlanner(TOKENS, **arguments(widnow=3, **SHAPE))
