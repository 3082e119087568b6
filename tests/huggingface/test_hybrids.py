"""Hybrids are exact over three ranks: their convolutions and states pass from rank to rank, and stop at documents."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron.testing.workers import preload, run_ranks
from tests.huggingface import conftest

HYBRIDS = ("jamba", "lfm2", "nemotron_h", "qwen3_next")

if conftest.INSTALLED:
    preload("tests.huggingface.sweep.attempt", *(f"transformers.models.{name}.modeling_{name}" for name in HYBRIDS))


def states(rank: int, world_size: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    from tests.huggingface.sweep.attempt import attempt

    return {kind: {v.section: (v.state, v.reason) for v in attempt(kind)} for kind in kinds}


@pytest.mark.support("models", "hybrids: convolutions, delta rules, state spaces; whole, packed, rematerialized")
def test_states_and_convolutions_cross_ranks_and_stop_at_documents() -> None:
    for found in run_ranks(3, states, HYBRIDS, timeout=170):
        assert {state for sections in found.values() for state in sections.values()} == {("exact", "")}, found


def without_exchange(rank: int, world_size: int) -> dict[str, Any]:
    from dfa_megatron.huggingface.recurrent import stand_ins

    vars(stand_ins)["dist_scan"] = lambda scan, tokens, **_: scan.run(dict(tokens), None, ())
    return states(rank, world_size, ("qwen3_next",))


def test_a_state_that_stays_on_its_rank_is_wrong() -> None:
    for found in run_ranks(2, without_exchange, timeout=100):
        assert [state for state, _ in found["qwen3_next"].values()] == ["wrong"]
