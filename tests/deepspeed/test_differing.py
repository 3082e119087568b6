"""What an outsider's JSON may get wrong is said at set-up, on every rank, before a group is made."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.pipeline import check_clipping
from dfa_megatron.deepspeed.tested_keys import check_filled_in
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness
from tests.support.models import build
from tests.support.workers import run_ranks


@pytest.mark.parametrize(
    "key", ["dist_flash_atention", "dist-flash-attention", "Dist_Flash_Attention", "distflashattn", "dfa", "dfa_size"]
)
def test_a_misspelled_block_is_refused_beside_a_right_one(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        DeepSpeedOptions.enabled_in({key: {"size": 4}, KEY: {"size": 2}})
    with pytest.raises(UnsupportedError, match=key):
        DeepSpeedOptions.enabled_in({key: {"size": 4}})


def test_keys_of_deepspeed_are_not_taken_for_the_block() -> None:
    from deepspeed.runtime import config, constants

    names = [value for module in (config, constants) for value in vars(module).values() if isinstance(value, str)]
    keys = {name: 1 for name in names if name.isidentifier() and name.islower()}
    assert len(keys) > 50
    assert DeepSpeedOptions.enabled_in(keys) is None


@pytest.mark.parametrize(
    "path", ["train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "optimizer.params.lr"]
)
def test_auto_without_trainer_is_refused_by_its_key(path: str) -> None:
    *outer, last = path.split(".")
    settings: Any = {last: "auto"}
    for name in reversed(outer):
        settings = {name: settings}
    with pytest.raises(UnsupportedError, match=f"{path}='auto'"):
        check_filled_in(settings)


def first_line(rank: int, world_size: int) -> list[Any]:
    harness.prepare_worker(rank)
    said: list[Any] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("dfa_megatron.deepspeed.engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for batch in ({"train_batch_size": 4}, {"gradient_accumulation_steps": 3}):
        model = build("Llama")
        settings = harness.settings(1, world_size) | {"train_micro_batch_size_per_gpu": 2} | batch
        dfa_ds.initialize(model=model, model_parameters=model.parameters(), config=settings)
    logger.removeHandler(handler)
    return said


def test_the_first_line_says_sequences_ranks_and_steps() -> None:
    (derived, stated), nothing = run_ranks(2, first_line, timeout=120)
    assert nothing == []
    assert derived == (
        "WARNING",
        "attention over sequences on 2 ranks; a step takes 4 sequences: 2 on each of 1 groups of ranks, 2 times "
        "(gradient_accumulation_steps, from train_batch_size)",
    )
    assert stated[0] == "INFO"
    assert "a step takes 6 sequences: 2 on each of 1 groups of ranks, 3 times" in stated[1]


@pytest.mark.parametrize(
    ("stage", "clipping", "stages", "refused"),
    [(0, 0.5, 2, True), (0, None, 2, True), (0, 0.0, 2, False), (1, 0.5, 2, False), (0, 0.5, 1, False)],
)
def test_clipping_the_stages_of_a_pipeline_by_the_norm_of_the_first_is_refused(
    stage: int, clipping: float | None, stages: int, refused: bool
) -> None:
    module = SimpleNamespace(topology=lambda: SimpleNamespace(get_dim=lambda axis: stages))
    settings = {} if clipping is None else {"gradient_clipping": clipping}
    with pytest.raises(UnsupportedError, match="for a pipeline at ZeRO 0") if refused else nullcontext():
        check_clipping(module, settings | {"zero_optimization": {"stage": stage}})
