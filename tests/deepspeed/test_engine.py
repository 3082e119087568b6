"""Training with the engine: checkpointing, accumulation, saving and loading, bfloat16, and a model of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dfa_megatron import DistFlashAttention
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.sharding import shard_sequence
from tests.deepspeed import harness
from tests.support.close import assert_close
from tests.support.models import build, text
from tests.support.workers import run_ranks


def start(config: dict[str, Any], seed: int = 0) -> Any:
    model = build("Qwen3", seed)
    return dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def step(engine: Any, seed: int) -> float:
    """One micro-batch, the same for all of a sequence's ranks and another for each sequence."""
    mesh = dfa_ds.mesh_of(engine)
    whole = text(1, 10 * mesh.size, seed=1000 * mesh.data_rank + seed, unlabelled=3)
    loss = engine(**whole).loss
    engine.backward(loss)
    engine.step()
    return harness.mean_over_ranks(loss)


def train(rank: int, world_size: int) -> None:
    """Accumulation and clipping: three steps of SGD move the weights as they move on one process."""
    harness.prepare_worker(rank)
    config = harness.settings(3, world_size, checkpoint="remat")
    config |= {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config["optimizer"]["params"]["lr"] = 0.1
    engine = start(config)
    want = build("Qwen3")
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for first in (0, 2, 4):
        for seed in (first, first + 1):
            got = step(engine, seed)
            loss = want(**text(1, 10 * world_size, seed=seed, unlabelled=3)).loss
            assert abs(got - loss.item()) < 1e-4 * loss.item()
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(want.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    engine.destroy()


class OwnModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(31, 16)
        self.qkv = torch.nn.Linear(16, 48)
        self.attention = DistFlashAttention(causal=True, config=TrainingConfig(schedule="ring"))
        self.head = torch.nn.Linear(16, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (t.unflatten(-1, (2, 8)) for t in self.qkv(x).chunk(3, -1))
        return self.head(x + self.attention(q, k, v).flatten(2))


def own_model(rank: int, world_size: int) -> None:
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    torch.manual_seed(0)
    model, want = OwnModel(), OwnModel()
    want.load_state_dict(model.state_dict())
    counted = harness.settings(2, 2) | {"train_batch_size": 2, "gradient_accumulation_steps": 1}
    with pytest.raises(UnsupportedError, match="it counts all 2 ranks"):
        dfa_ds.initialize(model=model, config=counted)
    with pytest.raises(UnsupportedError, match="its layers are not known"):
        dfa_ds.initialize(model=model, config=harness.settings(2, world_size, checkpoint="remat"))
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    for group in (alone, dist.group.WORLD):
        given = OwnModel()
        given.attention = DistFlashAttention(causal=True, group=group)
        name = given.attention.group_name
        refused = pytest.raises(UnsupportedError, match=rf"over ranks \[{rank}\]") if group is alone else nullcontext()
        with refused:
            dfa_ds.initialize(model=given, model_parameters=list(given.parameters()), config=harness.settings(2, 2))
        assert given.attention.group_name == name
    engine, *_ = dfa_ds.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=harness.settings(2, 2, schedule="balanced", verify="on"),
    )
    mesh = dfa_ds.mesh_of(engine)
    assert engine.module.attention.config.schedule == "ring"  # a config of the model's own overrides the block
    tokens = torch.randint(0, 31, (1, 16), generator=torch.Generator().manual_seed(1))
    engine.backward(dfa_ds.loss(engine(shard_sequence(tokens, group=mesh.group)), tokens, group=mesh.group))

    want.attention.group_name = alone.group_name
    F.cross_entropy(want(tokens)[0, :-1], tokens[0, 1:]).backward()
    for (name, parameter), reference in zip(engine.module.named_parameters(), want.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter).view_as(reference)
        assert_close(gradient, reference.grad, tolerance=1e-5, name=name)


def engines(rank: int, world_size: int) -> None:
    for each in (train, own_model):
        each(rank, world_size)


@pytest.mark.support("deepspeed", "gradient accumulation and clipping")
def test_accumulation_clipping_and_a_model_of_ones_own_are_those_of_one_process() -> None:
    run_ranks(2, engines, timeout=170)
