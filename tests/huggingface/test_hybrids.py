"""Hybrids are exact over three ranks: their convolutions and states pass along the paths of trees, and of documents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.huggingface import conftest
from tests.support.workers import preload, run_ranks

HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
AGAIN = {**dict.fromkeys(("jamba", "qwen3_next"), ("remat",)), "lfm2": ("packed",)}
"""What else is compared than a tree. Others are packed and rematerialized on two ranks, in tests/deepspeed."""
FILES = {name.removesuffix("_text") for name in HYBRIDS}

if conftest.INSTALLED:
    preload("tests.huggingface.sweep.attempt", *(f"transformers.models.{name}.modeling_{name}" for name in FILES))


def states(rank: int, world_size: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    from tests.huggingface.sweep.attempt import attempt

    verdicts = {kind: attempt(kind, ("tree", *AGAIN.get(kind, ()))) for kind in kinds}
    return {kind: {v.section: (v.state, v.reason) for v in found} for kind, found in verdicts.items()}


@pytest.mark.support("models", "hybrids: convolutions, delta rules, state spaces; whole, packed, rematerialized")
def test_states_and_convolutions_follow_paths_over_ranks() -> None:
    for found in run_ranks(3, states, HYBRIDS, timeout=170):  # whole: in test_sweep.py
        assert {state for sections in found.values() for state in sections.values()} == {("exact", "")}, found


def without_exchange(rank: int, world_size: int) -> dict[str, Any]:
    from dfa_megatron.huggingface.recurrent import stand_ins

    vars(stand_ins)["dist_scan"] = lambda scan, tokens, **_: scan.run(dict(tokens), None, ())
    return states(rank, world_size, ("olmo_hybrid",))


def test_a_state_that_stays_on_its_rank_is_wrong() -> None:
    for found in run_ranks(2, without_exchange, timeout=100):
        assert [state for state, _ in found["olmo_hybrid"].values()] == ["wrong"]
