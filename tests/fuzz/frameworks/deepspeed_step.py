"""Run a random step of a DeepSpeed engine with sequences over some ranks and data over others, or eager on one rank."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks.compare import Found
from tests.fuzz.frameworks.expected_refusals import LANGUAGE_MODELS as REFUSALS
from tests.fuzz.frameworks.language_models import LanguageDraw, draw_data, draw_model, made
from tests.fuzz.frameworks.transformers_step import PRELOADED as TRANSFORMERS
from tests.fuzz.frameworks.transformers_step import alone, draw_options, loss_of

__all__ = ["PRELOADED", "REFUSALS", "draw", "step"]

PRELOADED = ("deepspeed", *TRANSFORMERS, "tests.fuzz.frameworks.deepspeed_step")
MESHES = ((2, 1), (2, 1), (2, 2), (3, 1), (4, 1))
"""Ranks of a sequence, and sequences."""


LIMITS = {"float64 beside float32": 1e-5, "float32": 1e-5, "states in float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True, kw_only=True)
class DeepspeedDraw(LanguageDraw):
    """A step of an engine at a stage of ZeRO.

    zero, more: further settings, of the section `zero_optimization` and of the file.
    """

    over = "deepspeed"
    stage: int
    accumulated: int = 1
    zero: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Return what it computes in: DeepSpeed sums no float64 at ZeRO 0."""
        if "bf16" in self.more:
            return "bfloat16"
        if self.has_states:
            return "states in float32"
        return "float64 beside float32" if self.stage else "float32"

    @property
    def limit(self) -> float:
        """Return how far a number may be off, as a share of the largest."""
        return LIMITS[self.dtype]


def draw(seed: int, number: int) -> DeepspeedDraw:
    """Draw the step of that number: equal arguments give equal draws."""
    dice = random.Random(f"deepspeed {seed} {number}")
    size, sequences = dice.choice(MESHES)
    accumulated = dice.choice([1, 1, 2, 3])
    kind, model = draw_model(dice)
    checkpoint = dice.choice(["none", "none", "full", "remat", "remat"])
    reentrant = checkpoint != "none" and dice.random() < 0.3
    return DeepspeedDraw(
        seed=seed, number=number, size=size, sequences=sequences, stage=dice.choice([0, 1, 2, 3]),
        accumulated=accumulated, kind=kind, model=model,
        data=draw_data(dice, seed * 100_003 + number, size, accumulated * sequences, kind),
        options=draw_options(dice, checkpoint, kind, model["heads"], size), reentrant=reentrant,
        loss=dice.choice(["own", "function"]), warm=dice.choice([0, 0, 0, 1, 2]),
    )  # fmt: skip


def step(drawn: DeepspeedDraw, rank: int, ranks: int) -> Found:
    """Return the loss of the whole batch, and the gradients that DeepSpeed applies."""
    # ZeRO 3 wants every rank to run the same modules, whatever its tokens.
    model = made(drawn.kind, drawn.model, drawn.number, experts="batched_mm")
    if drawn.dtype != "float64 beside float32":
        model.float()
    if ranks > 1:
        return _together(drawn, model, rank)
    found = alone(drawn, model)
    for name, parameter in model.named_parameters():
        found.gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def _together(drawn: DeepspeedDraw, model: Any, rank: int) -> Found:
    from deepspeed.utils import safe_get_full_grad

    from dfa_megatron import deepspeed as dfa_ds
    from tests.deepspeed import harness

    harness.prepare_worker(rank)
    settings = harness.settings(drawn.stage, drawn.size, **drawn.options, reentrant=drawn.reentrant)
    settings |= {"gradient_accumulation_steps": drawn.accumulated, **drawn.more}
    settings["zero_optimization"] |= drawn.zero
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    if "bf16" in drawn.more:
        assert engine.communication_data_type == torch.float32
    mesh = dfa_ds.mesh_of(engine)
    assert (mesh.size, mesh.data_size, engine.train_batch_size()) == (
        *(drawn.size, drawn.sequences),
        drawn.sequences * drawn.accumulated,
    )
    for number in range(drawn.warm, -1, -1):  # the last is the first on one rank
        COUNTERS.reset()
        found, total = Found(None, {}, {}), torch.zeros((), dtype=torch.float64)
        for micro in range(drawn.accumulated):
            batch = (number * drawn.accumulated + micro) * drawn.sequences + mesh.data_rank
            loss = loss_of(drawn, engine, batch, mesh.group, found)
            engine.backward(loss)
            total += loss.detach().double() / drawn.accumulated
            if (number, micro) == (0, drawn.accumulated - 1):
                for name, parameter in engine.module.named_parameters():
                    gradient = safe_get_full_grad(parameter)
                    whole = torch.zeros(shapes[name]) if gradient is None else gradient.view(shapes[name]).clone()
                    found.gradients[name] = whole
            engine.step()
    drawn.asserts_counts(COUNTERS.snapshot(), model)
    engine.destroy()
    dist.all_reduce(total)
    found.loss = total.item() / dist.get_world_size()
    return found
