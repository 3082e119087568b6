"""Run a random step of a transformers model, distributed over its ranks or eager on one."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface.padding import IGNORED
from tests.fuzz.frameworks.expected_refusals import LANGUAGE_MODELS as REFUSALS
from tests.fuzz.frameworks.language_models import (
    DELTA_RULES,
    HYBRIDS,
    MODELS,
    LanguageDraw,
    draw_data,
    draw_model,
    draw_type,
    made,
)
from tests.fuzz.frameworks.steps import Found
from tests.huggingface.sweep.attempt import Float64

__all__ = ["PRELOADED", "REFUSALS", "draw", "draw_options", "step"]

PRELOADED = (
    "transformers",
    "tests.fuzz.frameworks.transformers_step",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma2",
            "gemma3",
            "gpt_oss",
            "mixtral",
            "qwen3_moe",
            "qwen3_next",
        )
    ),
)


@dataclass(frozen=True, kw_only=True)
class TransformersDraw(LanguageDraw):
    """A step of a model.

    between: what runs between each forward and its backward: "", "evaluation", distributed, or "local", on one rank.
    grown: layers are copied "before" attention is distributed, or "after"; "" for neither.
    function: the loss is a function "marked" as a sum of tokens, or one that is "not"; "" for transformers'.
    around: what holds the model: "", "wraps" around its forward, "DDP", "FSDP2" or, its inputs cast, "FSDP2 cast".
    """

    over = "transformers"
    between: str
    grown: str
    function: str
    around: str

    @property
    def dtype(self) -> str:
        """Return what it computes in: a recompute, of states too, takes no function mode."""
        if self.kind in HYBRIDS or any(name in self.kind for name in DELTA_RULES):  # their states are in float32
            return "float32"
        other = self.options["checkpoint"] != "none" or self.kind not in MODELS
        return "float64 beside float32" if other else "float64"

    def features(self) -> list[str]:
        """Return the names of the features that a run counts."""
        having = {f"{self.between} between": self.between}
        having |= {f"layers copied {self.grown}": self.grown, f"loss function {self.function}": self.function}
        having |= {f"in {self.around}": self.around}
        return [*super().features(), *(name for name, there in having.items() if there)]


def draw(seed: int, number: int) -> TransformersDraw:
    """Draw the step of that number: equal arguments give equal draws."""
    dice = random.Random(f"transformers {seed} {number}")
    size, sequences = dice.choice([(2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (2, 2)])
    kind, model = draw_type(dice) if dice.random() < 0.3 else draw_model(dice)
    checkpoint = dice.choice(["none", "none", "full", "remat", "remat"])
    options, losses = draw_options(dice, checkpoint, kind, model["heads"], size), ["own", "items", "function"]
    if is_type := kind not in MODELS:
        options |= {"kernel": "auto", "ulysses_degree": "auto", "loss_tile": "off"}
        losses = ["function"]
    own, reentrant = dice.choice(losses), checkpoint != "none" and not is_type and dice.random() < 0.4
    plain = not is_type and kind not in HYBRIDS
    around = dice.choice(["", "", "wraps", "DDP", "FSDP2", "FSDP2 cast"]) if plain and not reentrant else ""
    function = dice.choice(["", "", "marked", "marked", "not"]) if own != "function" and plain else ""
    if around.startswith("FSDP2"):
        options |= {"loss_tile": "off", "remat_offload": False}
    if function:
        options["loss_tile"] = "off"
    return TransformersDraw(
        seed=seed,
        number=number,
        size=size,
        sequences=sequences,
        kind=kind,
        model=model,
        data=draw_data(dice, seed * 100_003 + number, size, dice.choice([1, 1, 2, 3]) * sequences, kind),
        options=options,
        reentrant=reentrant,
        loss=own,
        between=dice.choice(["", "", "", "", "evaluation", "local"]),
        warm=dice.choice([0, 0, 0, 1, 2]),
        grown=dice.choice(["", "", "before", "after"]) if plain else "",
        function=function,
        around=around,
    )


def draw_options(dice: random.Random, checkpoint: str, kind: str, heads: int, ranks: int) -> dict[str, Any]:
    """Draw options of `TrainingConfig` that transformers models and DeepSpeed's block take."""
    return {
        "checkpoint": checkpoint,
        "schedule": dice.choice(["auto", "auto", "ring", "balanced", "balanced_shared", "greedy"]),
        "kernel": dice.choice(["auto", "auto", "auto", "reference", "cpu"]),
        "loss_tile": dice.choice(["off", "off", 1, 3, 4096]),
        "remat_offload": checkpoint != "none" and dice.random() < 0.15,
        "ulysses_degree": dice.choice([1, "auto", "auto", ranks if heads % ranks == 0 else 1]),
        "verify": dice.choice(["on", "on", "off"]),
    }


def step(drawn: TransformersDraw, rank: int, ranks: int) -> Found:
    """Return the mean loss, and gradients averaged over the ranks as DDP does."""
    model = made(drawn.kind, drawn.model, drawn.number)
    with Float64() if ranks == 1 or drawn.dtype == "float64" else contextlib.nullcontext():
        if drawn.grown and (ranks == 1 or drawn.grown == "before"):
            _grow(model)
        total = _alone(drawn, model) if ranks == 1 else _together(drawn, model)
    if ranks > 1:
        dist.all_reduce(total)
        total /= ranks
    found = Found(total.item(), {}, {})
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif ranks > 1 and drawn.around != "DDP":
            dist.all_reduce(gradient)
            gradient /= ranks
        found.gradients[name] = gradient
    return found


def _grow(model: Any) -> None:
    """Put a copy of each layer behind the others."""
    layers, config = model.model.layers, model.config
    layers.extend([copy.deepcopy(layer) for layer in layers])
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    config.num_hidden_layers = len(layers)
    if types := getattr(config, "layer_types", None):
        config.layer_types = [*types, *types]


def by_hand(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any, shift_labels: Any, **_: Any) -> Any:
    """Return the cross-entropy of the tokens that have a label, over a number of them."""
    scores = logits.log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
    return -scores[shift_labels != IGNORED].sum() / num_items_in_batch


unmarked = functools.wraps(by_hand)(lambda *args, **kwargs: by_hand(*args, **kwargs))


def _held(around: str, model: Any) -> Any:
    """Return what holds a model, and is called in its place."""
    if around == "wraps":
        own = model.forward
        model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    if around == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
    if around.startswith("FSDP2"):
        policy = MixedPrecisionPolicy(torch.float64, torch.float64, cast_forward_inputs=around.endswith("cast"))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    return model


def _alone(drawn: TransformersDraw, model: Any) -> torch.Tensor:
    every = [drawn.data.summed(model, number) for number in range(len(drawn.data.masks))]
    if drawn.loss == "items":
        loss = torch.stack([total for total, _ in every]).sum() / max(sum(count for _, count in every), 1)
    else:
        loss = torch.stack([total / max(count, 1) for total, count in every]).mean()
    loss.backward()
    return loss.detach()


def _together(drawn: TransformersDraw, model: Any) -> torch.Tensor:
    from dfa_megatron import huggingface as dfa_hf

    options = TrainingConfig(**drawn.options)
    group = _group(drawn.size)
    dfa_hf.distribute_attention(model, group=group, config=options, reentrant=drawn.reentrant)
    if drawn.grown == "after":
        _grow(model)
    if drawn.function:
        model.loss_function = dfa_hf.sums_tokens(by_hand) if drawn.function == "marked" else unmarked
    model = _held(drawn.around, model)
    for number in range(drawn.warm, -1, -1):  # the last is the first on one rank
        model.zero_grad()
        total = _step(drawn, model, number * len(drawn.data.masks), group)
    return total


def _group(size: int) -> Any:
    """Return the ranks that share this one's sequence; None for all."""
    if size == dist.get_world_size():
        return None
    if size not in _GROUPS:
        every = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
        _GROUPS[size] = [dist.new_group([*ranks]) for ranks in every][dist.get_rank() // size]
    return _GROUPS[size]


_GROUPS: dict[int, Any] = {}


def _step(drawn: TransformersDraw, model: Any, first: int, group: Any) -> torch.Tensor:
    """Run this sequence's micro-batches of the step that begins at a number, and return their loss."""
    from dfa_megatron import huggingface as dfa_hf

    losses, count = [], len(drawn.data.masks) // drawn.sequences
    mine = first + dist.get_rank() // drawn.size
    for number in range(mine, mine + len(drawn.data.masks), drawn.sequences):
        given = dict(drawn.data.batch(number))
        if drawn.loss == "items":
            given["num_items_in_batch"] = torch.tensor(drawn.data.labels) / drawn.sequences
            loss = model(**given).loss
        elif drawn.loss == "own":
            loss = model(**given).loss / count
        else:
            labels = given.pop("labels")
            loss = dfa_hf.causal_lm_loss(model(**given).logits, labels, group=group) / count
        _between(drawn, model, number)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _between(drawn: TransformersDraw, model: Any, number: int) -> None:
    """Evaluate another batch before the backward."""
    from dfa_megatron import huggingface as dfa_hf

    whole = {"input_ids": drawn.data.batch(number)["input_ids"].flip(1)}
    if drawn.between:
        model.eval()
        with torch.no_grad():
            if drawn.between == "evaluation":
                model(**whole)
            else:
                with dfa_hf.local_attention(model):
                    model(**whole)
        model.train()
