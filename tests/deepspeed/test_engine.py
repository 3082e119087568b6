"""Engines: accumulation, a model of one's own, shipped files, ours by DeepSpeed's name, and its scale of gradients."""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from pathlib import Path
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
from tests.support.workers import run_each


def train(rank: int, world_size: int) -> None:
    """Accumulation and clipping: three steps of SGD move the weights as they move on one process."""
    harness.prepare_worker(rank)
    config = harness.settings(3, world_size, checkpoint="remat")
    config["gradient_clipping"] = 0.5
    config["optimizer"]["params"]["lr"] = 0.1
    engine, want = harness.engine_of(config), build("Qwen3")
    engine.set_train_batch_size(2)  # sequences, one at a time
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    for first in (0, 2, 4):
        for seed in (first, first + 1):
            batch = text(1, 10 * world_size, seed=seed, unlabelled=3)
            found, loss = harness.step(engine, batch), want(**batch).loss
            assert abs(harness.mean_over_ranks(found) - loss.item()) < 1e-4 * loss.item()
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
            harness.engine_of(harness.settings(2, 2), given)
        assert given.attention.group_name == name
    engine = harness.engine_of(harness.settings(2, 2, schedule="balanced", verify="on"), model)
    mesh = dfa_ds.mesh_of(engine)
    assert engine.module.attention.config.schedule == "ring"  # a config of the model's own overrides the block
    tokens = torch.randint(0, 31, (1, 16), generator=torch.Generator().manual_seed(1))
    engine.backward(dfa_ds.loss(engine(shard_sequence(tokens, group=mesh.group)), tokens, group=mesh.group))

    want.attention.group_name = alone.group_name
    F.cross_entropy(want(tokens)[0, :-1], tokens[0, 1:]).backward()
    for (name, parameter), reference in zip(engine.module.named_parameters(), want.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter).view_as(reference)
        assert_close(gradient, reference.grad, tolerance=1e-5, name=name)


CONFIGS = sorted(path for path in (Path(__file__).parents[2] / "configs" / "deepspeed").glob("zero*.json"))


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    """The same for two ranks without a GPU: nothing to compile, nothing to pin."""
    settings["dist_flash_attention"]["size"] = 2
    settings["optimizer"]["params"]["torch_adam"] = True
    settings["zero_force_ds_cpu_optimizer"] = False
    for name in ("offload_optimizer", "offload_param"):
        settings["zero_optimization"].get(name, {})["pin_memory"] = False
    return settings


def shipped(rank: int, world_size: int) -> dict[str, list[float]]:
    harness.prepare_worker(rank)
    losses = {}
    for path in CONFIGS:
        config = on_cpu(json.loads(path.read_text()))
        config["optimizer"]["params"]["lr"] = 0.01
        engine, batch = harness.engine_of(config, build("Qwen2")), text(1, 16, seed=1)
        losses[path.stem] = [harness.mean_over_ranks(harness.step(engine, batch)) for _ in range(2)]
        engine.destroy()
    return losses


def call_by_its_name(rank: int, world_size: int) -> None:
    """A script that calls `deepspeed.initialize` gets distributed attention while ours is installed."""
    import deepspeed

    harness.prepare_worker(rank)
    own = deepspeed.initialize
    for _ in range(2):
        dfa_ds.install()
    assert deepspeed.initialize is not own
    engine = harness.engine_of(harness.settings(1, 2), initialize=deepspeed.initialize)
    assert dfa_ds.mesh_of(engine).size == 2
    assert engine.module.config._attn_implementation == "dfa"
    without_block = {key: value for key, value in harness.settings(1).items() if key != dfa_ds.KEY}
    for config in (without_block, harness.settings(1, enabled=False)):
        engine = harness.engine_of(config, initialize=deepspeed.initialize)
        assert engine.module.config._attn_implementation == "eager"
        with pytest.raises(UnsupportedError, match="missing or not enabled"):
            dfa_ds.mesh_of(engine)
    for _ in range(2):
        dfa_ds.uninstall()
    assert deepspeed.initialize is own


STAGES = (0, 1, 2, 3)


def ratio(rank: int, world_size: int, settings: dict[str, Any], mpu: Any = None) -> float:
    """The gradient that DeepSpeed applies over the true one, for the loss P * (my tokens' share of the mean)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = torch.nn.Linear(4, 1, bias=False)
    tokens = torch.arange(4.0 * 4).view(4, 4) + 1  # a sequence of 4 tokens, divided among the ranks
    engine = harness.engine_of(dict(settings), model, functools.partial(deepspeed.initialize, mpu=mpu))
    engine.backward(world_size * engine(tokens.chunk(world_size)[rank]).sum() / len(tokens))
    gradient = safe_get_full_grad(engine.module.weight).flatten()
    engine.destroy()
    return float((gradient / tokens.mean(0)).mean())


def plain(stage: int, **keys: Any) -> dict[str, Any]:
    settings = {**harness.settings(stage), **keys}
    del settings["dist_flash_attention"]
    return settings


def by_mpu(rank: int, world_size: int) -> list[float]:
    harness.prepare_worker(rank)
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(world_size)
    ratios = [ratio(rank, world_size, plain(stage), parallel_state_sp) for stage in STAGES]
    model = torch.nn.Sequential(DistFlashAttention(causal=True), torch.nn.Linear(4, 1))
    with pytest.raises(UnsupportedError, match="made in this process before"):
        harness.engine_of(harness.settings(1, world_size), model)
    return ratios


@pytest.mark.support("deepspeed", "gradient accumulation and clipping")
@pytest.mark.support("deepspeed", "every shipped configuration file learns")
def test_engines_train_as_one_process_shipped_files_learn_and_an_mpu_sums_below_stage_3_and_is_refused() -> None:
    """Should a version of DeepSpeed make the last fail, the reason to refuse an mpu is gone."""
    _, _, (losses, _), _, every = run_each(2, train, own_model, shipped, call_by_its_name, by_mpu, timeout=170)
    assert len(losses) == 6
    for name, (first, second) in losses.items():
        assert first > second, name
        assert abs(second - losses["zero1"][1]) < 0.05 * second, name
    for ratios in every:
        assert ratios == pytest.approx([2.0, 2.0, 2.0, 1.0], rel=1e-6)
