"""Pipelines: sequences lie across the data-parallel ranks of each stage, and train as on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dfa_megatron import DistFlashAttention
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import local_positions, shard_sequence
from tests.deepspeed import harness
from tests.support.close import assert_close
from tests.support.workers import by_turns, over_ranks

VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 31, 16, 2, 24, 4


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, positions = batch
        return self.tokens(ids) + self.places(positions)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DistFlashAttention(causal=True)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, WIDTH // HEADS)) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(self.attention(q, k, v).flatten(2))


class Head(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)


TOKENS = torch.zeros(1, 8, dtype=torch.int64)


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [Embedding(), *(Block() for _ in range(BLOCKS)), Head()]


def sequences(data_rank: int, count: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(data_rank)
    for unlabelled in range(count):
        ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : 14 + unlabelled] = -100  # with two ranks, the first has none
        labels[:, 20 + unlabelled % 3] = -100
        yield {"input_ids": ids, "labels": labels}


def reference(data_size: int, steps: int) -> tuple[list[float], torch.nn.Sequential]:
    model = torch.nn.Sequential(*layers())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for module in model.modules():
        if isinstance(module, DistFlashAttention):
            module.group_name = alone.group_name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = [sequences(rank, 2 * steps) for rank in range(data_size)]
    losses = []
    for _ in range(steps):
        total = 0.0
        for batch in (next(stream) for stream in streams for _ in range(2)):
            logits = model((batch["input_ids"], torch.arange(LENGTH)[None]))
            loss = F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:]) / (2 * data_size)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


@pytest.mark.support("deepspeed", "pipelines")
@pytest.mark.parametrize(("ranks", "stages", "size"), [(2, 1, 2), (4, 2, 2)])
@over_ranks(timeout=170)
def test_a_pipeline_over_shared_sequences_trains_as_one_process(rank: int, ranks: int, stages: int, size: int) -> None:
    harness.prepare_worker(rank)
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    steps = 2
    mesh = dfa_ds.make_mesh(size, stages=stages)
    want_losses, want = reference(mesh.data_size, steps)
    ways = [(0, "remat", True), (1, "full", False)]
    ways += [(0, "remat", False), (1, "remat", False), (0, "full", False), (0, "none", False)] if stages > 1 else []
    for stage, checkpoint, reentrant in by_turns(ways):
        module = PipelineModule(
            layers(),
            num_stages=stages,
            loss_fn=lambda logits, labels: dfa_ds.loss(logits, labels, group=mesh.group),
            partition_method="uniform",
            checkpointable_layers=["Block"] if reentrant else None,  # token numbers have no gradient
        )
        block = {"checkpoint": checkpoint, "remat_offload": stage == 1}
        config = harness.settings(stage, size, **block) | {"gradient_accumulation_steps": 2}
        config["optimizer"]["params"]["lr"] = 0.1
        if reentrant:
            config["pipeline"] = {"use_reentrant": True}
        engine, *_ = dfa_ds.initialize(model=module, config=config)
        assert dfa_ds.mesh_of(engine) == mesh

        def parts() -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
            for whole in sequences(mesh.data_rank, 2 * steps):
                ids = shard_sequence(whole["input_ids"], group=mesh.group)
                places = local_positions(whole["input_ids"].shape[1], group=mesh.group)[None]
                yield (ids, places.expand_as(ids)), whole["labels"]

        stream = parts()
        COUNTERS.reset()
        losses = [engine.train_batch(stream).item() for _ in range(steps)]
        assert losses == pytest.approx(want_losses, rel=1e-5)
        counts = COUNTERS.snapshot()
        mine = range(module._local_start, module._local_stop)
        attentions = 2 * steps * sum(isinstance(want[index], Block) for index in mine)
        assert counts["attention_forwards"] == attentions * (2 if checkpoint == "full" else 1)
        assert counts["reused"] == (attentions if checkpoint == "remat" else 0)
        for got, index in zip(module.forward_funcs, mine, strict=True):
            for (name, parameter), wanted in zip(got.named_parameters(), want[index].parameters(), strict=True):
                where = f"ZeRO {stage} {checkpoint}, layer {index}, {name}"
                assert_close(parameter, wanted, tolerance=1e-5, name=where)
        engine.destroy()


@over_ranks(2, timeout=120)
def test_pipelines_that_do_not_fit_are_refused(rank: int, ranks: int) -> None:
    harness.prepare_worker(rank)
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import ProcessTopology

    deepspeed.init_distributed()
    module = PipelineModule(layers(), num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform")
    with pytest.raises(UnsupportedError, match="a sequence on 2 of 1 ranks"):
        dfa_ds.initialize(model=module, config=harness.settings(0, 2))
    with pytest.raises(UnsupportedError, match="3 stages on 2 ranks"):
        dfa_ds.make_mesh(stages=3)
    config: dict[str, Any] = harness.settings(0, 1, checkpoint="remat")
    with pytest.raises(UnsupportedError, match="cpu_checkpointing for a pipeline"):
        dfa_ds.initialize(model=module, config=config | {"activation_checkpointing": {"cpu_checkpointing": True}})
    swapped = ProcessTopology(axes=["data", "pipe"], dims=[1, 2])
    module = PipelineModule(layers(), topology=swapped, loss_fn=F.cross_entropy, partition_method="uniform")
    with pytest.raises(UnsupportedError, match="axes data, pipe"):
        dfa_ds.initialize(model=module, config=harness.settings(0, 1))
