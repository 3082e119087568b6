"""torch_dist checkpoints go from distributed attention to Megatron's own and back, and to another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import megatron_harness as harness
from tests.frameworks.compare import Found
from tests.frameworks.megatron_rows import FULL, MEGATRONS, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.megatron import checkpoints, sharded
from tests.support.workers import by_turns, run_ranks

CP2 = {"cp": 2}
HYBRID = {"mtp_num_layers": 1, "hetereogenous_dist_checkpoint": True}


def trained(row: MegatronDraw, *numbers: int, load: str = "", save: str = "") -> Found:
    """The last of a row's steps, which count down to 0, from or to a checkpoint of model and optimizer."""
    with torch.compiler.set_stance("force_eager"), harness.with_layers(row):
        harness.start(row)
        models = harness.wrapped(row)
        optimizer = sharded.optimizer_of(row.optimizer, models)
        if load:
            checkpoints.load(load, models[0].module, optimizer)
        found = harness.train(row, models, optimizer, numbers)
        if save:
            checkpoints.save(save, models[0].module, optimizer)
        return found


def resume(rank: int, ranks: int, folder: str, row: MegatronDraw) -> dict[int, float]:
    """Stop after a step and go on with the other's layers; the last checkpoint is ours."""
    alone = replace(row.alone(), optimizer=row.optimizer)
    whole = trained(alone, 2, 1, 0).tokens
    boundary = replace(row, options={**(row.options or {}), "data_layout": "boundary"})
    ways = [(alone, boundary)] if row.tp == 1 else []
    for source, target in (*ways, (row, alone)):
        place = f"{folder}/{row.name.partition(':')[0]}-{source.options is None}"
        trained(source, 2, save=place)
        resumed = trained(target, 1, 0, load=place).tokens
        assert resumed == {at: pytest.approx(whole[at], abs=1e-4) for at in resumed}
    return whole


def on_other_ranks(rank: int, ranks: int, folder: str) -> dict[int, float]:
    row = like("plain", {"cp": ranks}, checkpoint="auto", config=FULL, **MEGATRONS)
    return trained(row, 1, 0, load=f"{folder}/plain-False").tokens


def exchange_states(rank: int, ranks: int, folder: str) -> None:
    row = like("stack", CP2)
    with harness.with_layers(row):
        for source, target in ((row, row.alone()), (row.alone(), row)):
            place = f"{folder}/stack-{source.options is None}"
            harness.start(source)
            saved = harness.model_of(source)
            checkpoints.save(place, saved)
            harness.start(target)
            loaded, plain = (harness.model_of(target) for _ in range(2))
            for parameter in (*loaded.parameters(), *plain.parameters()):
                parameter.data.zero_()
            checkpoints.load(place, loaded)
            plain.load_state_dict(saved.state_dict())
            wanted: dict[str, Any] = dict(saved.named_parameters())
            for model in (loaded, plain):
                found = dict(model.named_parameters())
                assert found.keys() == wanted.keys()
                assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


ROWS = (
    like("plain", CP2, checkpoint="auto", config=FULL, **MEGATRONS),
    like("learnable", {"tp": 2}, checkpoint="auto", config=FULL, **MEGATRONS),  # each rank has the logits of its heads
    like("packed delta", CP2, checkpoint="auto", config=FULL | HYBRID, pack="", batch=2, **MEGATRONS),
)


def each(rank: int, ranks: int, folder: str) -> dict[int, float]:
    losses, *_ = (resume(rank, ranks, folder, row) for row in (ROWS[0], *by_turns(ROWS[1:])))
    exchange_states(rank, ranks, folder)
    return losses


@pytest.mark.support("megatron", "checkpoints to and from Megatron's own attention")
@pytest.mark.support("megatron", "checkpoints of hybrids and prediction layers, CP 2 to CP 1 and back")
def test_training_goes_on_with_megatrons_attention_and_back_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Hybrid stacks go there and back to the bit."""
    losses = run_ranks(2, each, str(tmp_path), timeout=120)[0]
    for tokens in run_ranks(3, on_other_ranks, str(tmp_path)):
        assert tokens == {at: pytest.approx(losses[at], abs=1e-4) for at in tokens}
