"""Recorded runs under other states of PyTorch than those of their recording; `tests.fuzz.attempt` draws more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from dfa_megatron.runtime.prepare import in_use
from tests.fuzz.attempt import Listens, Rounds
from tests.support.attend import attend, case, compare, pack, results
from tests.support.workers import over_ranks

KINDS: list[dict[str, Any]] = [{"kernel": "reference"}, {"kernel": "reference", "layout": "zigzag"}, {"kernel": "cpu"}]


STATES: dict[str, Callable[[bool], AbstractContextManager[Any]]] = {
    "autocast": lambda on: torch.autocast("cpu", torch.bfloat16, enabled=on),
    "functions": lambda on: Rounds() if on else nullcontext(),
}


def _rounding(rank: int, ranks: int, state: str, where: str) -> None:
    """Also where only a call that is replayed meets it."""
    for options in KINDS if ranks > 1 else ({"kernel": "reference"}, {"kernel": "cpu"}):
        for call in range(6):
            states = [partial(STATES[state], call != 3 and where in (name, "both")) for name in ("forward", "backward")]
            compare(case(8 * ranks, dtype=torch.float32, seed=call), rank, ranks, states=tuple(states), **options)


@pytest.mark.parametrize(
    ("state", "where"), [("autocast", "both"), *(("functions", where) for where in ("forward", "backward", "both"))]
)
def test_a_state_that_rounds_rounds_no_replay(state: str, where: str) -> None:
    _rounding(0, 1, state, where)


@over_ranks(2, timeout=120)
def test_states_that_round_and_a_default_device_change_no_number_over_ranks(rank: int, ranks: int) -> None:
    for state in STATES:
        _rounding(rank, ranks, state, "both")
    whole, packed = case(8 * ranks), pack((0, 3, 8 * ranks))
    for one in (whole, packed):
        compare(one, rank, ranks, states=(partial(torch.device, "meta"),) * 2)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_an_evaluation_between_replays_changes_no_number(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    for seed in range(5):
        whole = case(8, seed=seed)
        with mode():
            attend(whole, *whole.inputs)
        compare(whole)


def test_a_mode_sees_the_operations_of_a_backward_that_is_recorded() -> None:
    """The same in every call."""

    class Counts(Listens):
        seen = 0

        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().__torch_dispatch__(*args, **kwargs)

    for known in in_use():  # of other tests
        known.bound.clear()
    seen = []
    for _ in range(5):
        counts = Counts()
        results(case(8), kernel="reference", states=(nullcontext, lambda counts=counts: counts))
        results(case(8), kernel="reference")
        seen.append(counts.seen)
    assert len(set(seen)) == 1, seen
