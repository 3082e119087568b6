"""A script that calls `deepspeed.initialize` gets distributed attention while ours is installed."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness
from tests.support.models import build
from tests.support.workers import run_ranks


def start(config: dict[str, Any]) -> Any:
    import deepspeed

    model = build("Llama")
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def call_by_its_name(rank: int, world_size: int) -> None:
    import deepspeed

    harness.prepare_worker(rank)
    own = deepspeed.initialize
    for _ in range(2):
        dfa_ds.install()
    assert deepspeed.initialize is not own
    engine = start(harness.settings(1, 2))
    assert dfa_ds.mesh_of(engine).size == 2
    assert engine.module.config._attn_implementation == "dfa"
    without_block = {key: value for key, value in harness.settings(1).items() if key != dfa_ds.KEY}
    for config in (without_block, harness.settings(1, enabled=False)):
        engine = start(config)
        assert engine.module.config._attn_implementation == "eager"
        with pytest.raises(UnsupportedError, match="missing or not enabled"):
            dfa_ds.mesh_of(engine)
    for _ in range(2):
        dfa_ds.uninstall()
    assert deepspeed.initialize is own


def test_deepspeeds_own_name_honours_the_block_while_ours_is_installed() -> None:
    run_ranks(2, call_by_its_name, timeout=120)
