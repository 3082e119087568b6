"""Packs that are planned ahead, in data-loader workers: the same results, and nothing is planned in the loop."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost import choose
from dfa_megatron.plan.language.mask import Mask, sliding_window
from dfa_megatron.plan.language.tree import Tree, prompt_tree
from dfa_megatron.planner import AttentionPlanner
from dfa_megatron.runtime import rank_plan
from dfa_megatron.runtime.rank_plan import RankPlan
from tests.support.arguments import arguments
from tests.support.attend import Case, compare, pack
from tests.support.packs import random_offsets
from tests.support.workers import run_ranks

SHAPE: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32, "device": "cpu"}
TOKENS = 24
Sees = tuple[int, ...] | Mask


@dataclass(frozen=True)
class Collate:
    """What a data loader's worker does with the documents of a pack, or with a mask."""

    planners: tuple[AttentionPlanner, ...]

    def __call__(self, batch: Sequence[Sees]) -> tuple[Sees, list[RankPlan]]:
        (sees,) = batch
        return sees, [planner(sees) for planner in self.planners]


def attend_and_compare(rank: int, ranks: int, sees: Sees, dtype: torch.dtype, **options: Any) -> None:
    if isinstance(sees, Mask):
        case = Case(tokens=sees.length, batch=1, head_dim=32, dtype=dtype, mask=sees)
        return compare(case, rank, ranks, **{name: value for name, value in options.items() if name != "window_size"})
    window = options.get("window_size", (-1, -1))
    return compare(pack(sees, head_dim=32, dtype=dtype, seed=len(sees), window_size=window), rank, ranks, **options)


def _loop(rank: int, ranks: int, options: dict[str, Any]) -> int:
    """Train over a loader; returns how often a pack was planned in this process."""
    multiprocessing.current_process()._config["daemon"] = False  # a loader's workers are processes of their own
    draw = random.Random(ranks)
    batches: list[Sees] = [random_offsets(ranks * TOKENS, draw) for _ in range(2)]
    kinds: list[dict[str, Any]] = [options, options | {"window_size": (5, 0)}]
    if options.get("ulysses_degree") == "auto":
        lengths = [ranks * TOKENS // 4] * 4
        batches = [prompt_tree(lengths, [-1, 0, 1, 0]), sliding_window(4 * lengths[0], 50, 30)]
    planners = tuple(AttentionPlanner(TOKENS, **arguments(dtype=torch.float64, **SHAPE, **kind)) for kind in kinds)
    degrees = set[int]()
    choose._of_schedules = looks = Mock(wraps=choose._of_schedules)  # type: ignore[misc]
    for sees, plans in DataLoader(batches, batch_size=1, num_workers=1, collate_fn=Collate(planners)):
        for plan in plans:
            degrees.add(plan.degree)
            plan.use()
        for kind in kinds:
            attend_and_compare(rank, ranks, sees, torch.float64, **kind)
    assert degrees == ({1, 2} if (asked := options.get("ulysses_degree", 1)) == "auto" else {asked})
    return rank_plan.planned.cache_info().misses + looks.call_count


@pytest.mark.support("runtime", "packs planned ahead by data-loader workers")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"layout": "load_balanced"}),
        (4, {"ulysses_degree": 2, "schedule": "greedy"}),
        (4, {"ulysses_degree": "auto", "hardware": "cpu-loopback"}),
    ],
)
def test_what_a_worker_has_planned_is_not_planned_in_the_loop(ranks: int, options: dict[str, Any]) -> None:
    assert run_ranks(ranks, _loop, options, timeout=170) == [0] * ranks


def _other_dtype(rank: int, ranks: int) -> list[str]:
    """Calls in another dtype than was planned for; returns the warnings."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dfa_megatron.runtime.rank_plan").addHandler(handler)
    planner = AttentionPlanner(TOKENS, **arguments(dtype=torch.float16, **SHAPE))
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
    planner = AttentionPlanner(TOKENS, **arguments(dtype=torch.float32, **SHAPE))
    for end in range(1, 9):
        planner((0, end, TOKENS)).use()
    assert [problem.asks.cu_seqlens[1] for problem, _ in rank_plan._ahead] == [6, 7, 8]


def test_what_cannot_be_planned_is_said_where_it_is_asked_for() -> None:
    with pytest.raises(UnsupportedError, match="ulysses_degree=2"):
        AttentionPlanner(TOKENS, **arguments(ulysses_degree=2, **SHAPE))
    with pytest.raises(UnsupportedError, match="may not fall"):
        AttentionPlanner(TOKENS, **arguments(**SHAPE))((0, 9, 7, TOKENS))
    assert AttentionPlanner(TOKENS, **arguments(**SHAPE))((0, 9, 9, TOKENS)).schedule
    with pytest.raises(UnsupportedError, match="hold 24 tokens together"):
        AttentionPlanner(TOKENS, **arguments(**SHAPE))((0, 9, 2 * TOKENS))
    with pytest.raises(UnsupportedError, match="flash4"):
        AttentionPlanner(TOKENS, **arguments(kernel="flash4", **SHAPE))((0, 9, TOKENS))
    with pytest.raises(UnsupportedError, match="does not know whether it is causal"):
        AttentionPlanner(TOKENS, **arguments(causal=None, **SHAPE))((0, 9, TOKENS))
    assert AttentionPlanner(TOKENS, **arguments(causal=None, **SHAPE))(Tree((8, 16), (-1, 0))).schedule
    with pytest.raises(TypeError, match="widnow"):
        AttentionPlanner(TOKENS, **arguments(widnow=3, **SHAPE))
