"""Run a random step of a DeepSpeed engine with sequences over some ranks and data over others, or eager on one rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.fuzz.frameworks.expected_refusals import LANGUAGE_MODELS as REFUSALS
from tests.fuzz.frameworks.language_models import LanguageDraw, draw_data, draw_model, made
from tests.fuzz.frameworks.steps import Found
from tests.fuzz.frameworks.transformers_step import PRELOADED as TRANSFORMERS
from tests.fuzz.frameworks.transformers_step import draw_options
from tests.huggingface.sweep.attempt import Float64

__all__ = ["PRELOADED", "REFUSALS", "draw", "step"]

PRELOADED = ("deepspeed", *TRANSFORMERS, "tests.fuzz.frameworks.deepspeed_step")
MESHES = ((2, 1), (2, 1), (2, 2), (3, 1), (4, 1))
"""Ranks of a sequence, and sequences."""


@dataclass(frozen=True, kw_only=True)
class DeepspeedDraw(LanguageDraw):
    """A step of an engine at a stage of ZeRO."""

    over = "deepspeed"
    stage: int
    accumulated: int

    @property
    def dtype(self) -> str:
        """Return what it computes in: DeepSpeed sums no float64 at ZeRO 0."""
        return "float64 beside float32" if self.stage else "float32"

    def features(self) -> list[str]:
        """Return the names of the features that a run counts."""
        return [*super().features(), f"ZeRO {self.stage}", f"{self.accumulated} micro-batches"]


def draw(seed: int, number: int) -> DeepspeedDraw:
    """Draw the step of that number: equal arguments give equal draws."""
    dice = random.Random(f"deepspeed {seed} {number}")
    size, sequences = dice.choice(MESHES)
    accumulated = dice.choice([1, 1, 2, 3])
    kind, model = draw_model(dice)
    checkpoint = dice.choice(["none", "none", "full", "remat", "remat"])
    reentrant = checkpoint != "none" and dice.random() < 0.3
    return DeepspeedDraw(
        seed=seed,
        number=number,
        size=size,
        sequences=sequences,
        stage=dice.choice([0, 1, 2, 3]),
        accumulated=accumulated,
        kind=kind,
        model=model,
        data=draw_data(dice, seed * 100_003 + number, size, accumulated * sequences, kind),
        options=draw_options(dice, checkpoint, kind, model["heads"], size),
        reentrant=reentrant,
        loss=dice.choice(["own", "function"]),
        warm=dice.choice([0, 0, 0, 1, 2]),
    )


def step(drawn: DeepspeedDraw, rank: int, ranks: int) -> Found:
    """Return the loss of the whole batch, and the gradients that DeepSpeed applies."""
    # ZeRO 3 wants every rank to run the same modules, whatever its tokens.
    model = made(drawn.kind, drawn.model, drawn.number, experts="batched_mm")
    if ranks > 1 and drawn.dtype == "float32":
        model.float()
    return _alone(drawn, model) if ranks == 1 else _together(drawn, model, rank)


def _alone(drawn: DeepspeedDraw, model: Any) -> Found:
    with Float64():
        every = [drawn.data.summed(model, number) for number in range(len(drawn.data.masks))]
        loss = torch.stack([total / max(count, 1) for total, count in every]).mean()
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return Found(loss.item(), gradients, {})


def _together(drawn: DeepspeedDraw, model: Any, rank: int) -> Found:
    from deepspeed.utils import safe_get_full_grad

    from dfa_megatron import deepspeed as dfa_ds
    from tests.deepspeed import harness

    harness.prepare_worker(rank)
    settings = harness.settings(drawn.stage, drawn.size, **drawn.options, reentrant=drawn.reentrant)
    settings["gradient_accumulation_steps"] = drawn.accumulated
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    for number in range(drawn.warm, -1, -1):  # the last is the first on one rank
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(drawn.accumulated):
            loss = _loss(drawn, engine, number * drawn.accumulated + micro)
            engine.backward(loss)
            total += loss.detach().double() / drawn.accumulated
            if (number, micro) == (0, drawn.accumulated - 1):
                applied = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
                gradients = {name: gradient.view(shapes[name]).clone() for name, gradient in applied.items()}
            engine.step()
    engine.destroy()
    dist.all_reduce(total)
    return Found(total.item() / dist.get_world_size(), gradients, {})


def _loss(drawn: DeepspeedDraw, engine: Any, micro: int) -> torch.Tensor:
    """Return the loss of a micro-batch of this rank's sequence."""
    from dfa_megatron import deepspeed as dfa_ds

    mesh = dfa_ds.mesh_of(engine)
    given = dict(drawn.data.batch(micro * drawn.sequences + mesh.data_rank))
    if drawn.loss == "own":
        own: torch.Tensor = engine(**given).loss
        return own
    labels = given.pop("labels")
    return dfa_ds.loss(engine(**given).logits, labels, group=mesh.group)
