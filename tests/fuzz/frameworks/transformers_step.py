"""Run a random step of a transformers model, distributed over its ranks or eager on one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.distribute import transformers_model
from dfa_megatron.huggingface.loss import computes_loss
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import shard_sequence
from tests.frameworks.compare import Found
from tests.fuzz.frameworks.expected_refusals import LANGUAGE_MODELS as REFUSALS
from tests.fuzz.frameworks.language_models import MODELS, PLAIN, LanguageDraw, draw_data, draw_model, draw_type, made
from tests.huggingface.one_process import Float64, first_of_equals, total_loss
from tests.support.close import assert_close

__all__ = ["PRELOADED", "REFUSALS", "draw", "draw_options", "step"]

_MODULES = "llama mistral qwen2 qwen3 gemma2 gemma3 gpt_oss mixtral qwen3_moe qwen3_next"
PRELOADED = (
    "transformers",
    "tests.fuzz.frameworks.transformers_step",
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODULES.split()),
)


LIMITS = {"float64": 1e-10, "float64 of other types": 1e-6, "float64 beside float32": 1e-5, "float32": 1e-4}


@dataclass(frozen=True, kw_only=True)
class TransformersDraw(LanguageDraw):
    """A step of a model.

    between: what runs between each forward and its backward: "", a name of `BETWEEN`, or "anything".
    grown: layers are copied or replaced "before" attention is distributed, or "after"; "" for neither.
    function: the loss is a function "marked" as a sum of tokens, or one that is "not"; "" for transformers'.
    around: what holds the model: "", "wraps" around its forward, "DDP", "FSDP2" or, its inputs cast, "FSDP2 cast".
    unlisted: the type was not tried before. as_kept: gradients are compared with those of a run that keeps all, too.
    near: how far a number may be off, if that is not the limit of what it computes in.
    """

    over = "transformers"
    between: str = ""
    grown: str = ""
    function: str = ""
    around: str = ""
    unlisted: bool = False
    as_kept: bool = False
    near: float = 0.0

    @property
    def dtype(self) -> str:
        """Return what it computes in: recomputes, of states too, and routers' losses take no function mode."""
        if self.options["checkpoint"] == "none" and "output_router_logits" not in self.model:
            return "float64"
        return "float32" if self.has_states else "float64 beside float32"

    @property
    def limit(self) -> float:
        """Return how far a number may be off, as a share of the largest."""
        is_other = self.dtype == "float64" and self.kind not in PLAIN  # a type may turn its positions in float32
        return self.near or LIMITS[self.dtype + " of other types" * is_other]


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
    plain = kind in PLAIN
    around = dice.choice(["", "", "wraps", "DDP", "FSDP2", "FSDP2 cast"]) if plain and not reentrant else ""
    function = dice.choice(["", "", "marked", "marked", "not"]) if own != "function" and plain else ""
    if around.startswith("FSDP2"):
        options |= {"loss_tile": "off", "remat_offload": False}
    if function:
        options["loss_tile"] = "off"
    data = draw_data(dice, seed * 100_003 + number, size, dice.choice([1, 1, 2, 3]) * sequences, kind)
    if sequences > 1 and data.pack == "mask":
        options["schedule"] = "auto"  # another may refuse the mask of one group, for which the others would wait
    return TransformersDraw(
        seed=seed, number=number, size=size, sequences=sequences, kind=kind, model=model, data=data,
        options=options, reentrant=reentrant, loss=own,
        between=dice.choice(["", "", "", "", "evaluation", "anything" if plain and not around else "local"]),
        warm=dice.choice([0, 0, 0, 1, 2]), grown=dice.choice(["", "", "before", "after"]) if plain else "",
        function=function, around=around,
    )  # fmt: skip


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
    """Return the mean loss, logits, and gradients averaged over the ranks as DDP does."""
    with drawn.plant() if drawn.plant and ranks > 1 else contextlib.nullcontext():
        found = _step(drawn, ranks, drawn.dtype)
    if drawn.as_kept and ranks > 1:
        options = {**drawn.options, "checkpoint": "none"}
        kept = _step(dataclasses.replace(drawn, options=options, reentrant=False, between=""), ranks, drawn.dtype)
        near = 0.0 if drawn.kind in PLAIN else 1e-7  # to the bit
        for name, gradient in kept.gradients.items():
            assert_close(found.gradients[name], gradient, tolerance=near, name=f"{name} of a run that keeps all")
    return found


def _step(drawn: TransformersDraw, ranks: int, dtype: str) -> Found:
    model = made(drawn.kind, drawn.model, drawn.number)
    if drawn.unlisted and ranks == 1:  # a refusal, before one process may fail
        dfa_hf.distribute_attention(copy.deepcopy(model), unlisted=True)
    with Float64() if dtype == "float64" else contextlib.nullcontext(), _chooses(ranks):
        if drawn.grown and (ranks == 1 or drawn.grown == "before"):
            _grow(model, drawn.number % WAYS)
        found = alone(drawn, model) if ranks == 1 else _together(drawn, model)
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif ranks > 1 and drawn.around != "DDP":
            dist.all_reduce(gradient)
            gradient /= ranks
        found.gradients[name] = gradient
    return found


def _chooses(ranks: int) -> contextlib.AbstractContextManager[Any]:
    """Have one process choose among equal scores of an indexer as ranks do."""
    return first_of_equals() if ranks == 1 else contextlib.nullcontext()


def _grow(model: Any, way: int) -> None:
    """Change the list of layers in the way of a number; each attention then has a number of its own."""
    layers, config = model.model.layers, model.config
    types, other = [*(getattr(config, "layer_types", None) or ())], copy.deepcopy(layers[1])
    for parameter in other.parameters():
        parameter.data.neg_()
    if way == 0:
        layers.extend([copy.deepcopy(layer) for layer in layers])
        types += types
    elif way == 1:
        layers.append(copy.deepcopy(layers[1]))
        types += types[1:2]
    elif way == 2:
        layers.insert(1, other)
        types[1:1] = types[1:2]
    elif way == 3:
        layers[1].self_attn = other.self_attn
    else:
        layers[1] = other
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    config.num_hidden_layers = len(layers)
    if types:
        config.layer_types = types


WAYS = 5
"""In which layers are grown."""


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


def alone(drawn: LanguageDraw, model: Any) -> Found:
    """Return the loss and logits of one process, after its backward."""
    every = {number: drawn.batch(model, number) for number in range(len(drawn.data.masks))}
    found = {number: total_loss(model, batch) for number, batch in every.items()}
    if drawn.loss == "items":
        loss = torch.stack([total for _, total, _ in found.values()]).sum() / max(drawn.data.labels, 1)
    else:
        loss = torch.stack([total / max(count, 1) for _, total, count in found.values()]).mean()
    loss.backward()
    outputs = {f"logits {number}": _real(logits, every[number]) for number, (logits, _, _) in found.items()}
    return Found(loss.item(), {}, {}, outputs=outputs)


def _real(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return logits with zeros where there is padding."""
    mask = batch.get("attention_mask")
    return logits.detach() if mask is None else logits.detach() * mask[..., None]


def _together(drawn: TransformersDraw, model: Any) -> Found:
    group, inner = _group(drawn.size), model
    shapes = {name: x.shape for name, x in model.state_dict().items()}
    options = TrainingConfig(**drawn.options)
    theirs = options.checkpoint == "auto"  # the framework says which layers are checkpointed, and how
    own = drawn.reentrant and not theirs
    dfa_hf.distribute_attention(model, group=group, config=options, reentrant=own, unlisted=drawn.unlisted)
    if theirs:
        model.gradient_checkpointing_enable({"use_reentrant": drawn.reentrant})
    assert shapes == {name: x.shape for name, x in model.state_dict().items()}, "a checkpoint of it is another one"
    if drawn.grown == "after":
        _grow(model, drawn.number % WAYS)
    if drawn.function:
        model.loss_function = dfa_hf.sums_tokens(by_hand) if drawn.function == "marked" else unmarked
    model = _held(drawn.around, model)
    for number in range(drawn.warm, -1, -1):  # the last is the first on one rank
        model.zero_grad()
        COUNTERS.reset()
        found = _micro_batches(drawn, model, number * len(drawn.data.masks), group)
    drawn.asserts_counts(COUNTERS.snapshot(), inner)
    return found


def _group(size: int) -> Any:
    """Return the ranks that share this one's sequence; None for all."""
    if size == dist.get_world_size():
        return None
    if size not in _GROUPS:
        every = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
        _GROUPS[size] = [dist.new_group([*ranks]) for ranks in every][dist.get_rank() // size]
    return _GROUPS[size]


_GROUPS: dict[int, Any] = {}


def _micro_batches(drawn: TransformersDraw, model: Any, first: int, group: Any) -> Found:
    """Run this sequence's micro-batches of the step that begins at a number."""
    losses, count = [], len(drawn.data.masks) // drawn.sequences
    found, mine = Found(None, {}, {}), first + dist.get_rank() // drawn.size
    for number in range(mine, mine + len(drawn.data.masks), drawn.sequences):
        loss = loss_of(drawn, model, number, group, found)
        loss = loss if drawn.loss == "items" else loss / count
        _between(drawn, model, number)
        loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    found.loss = total.item() / dist.get_world_size()
    return found


def loss_of(drawn: LanguageDraw, model: Any, number: int, group: Any, found: Found) -> torch.Tensor:
    """Return the loss of a batch over the ranks, and keep the logits of this rank's tokens."""
    batch = drawn.batch(model, number)
    given, own = dict(batch), drawn.loss != "function" and computes_loss(transformers_model(model))
    labels = given["labels"] if own else given.pop("labels")
    if drawn.loss == "items":
        given["num_items_in_batch"] = torch.tensor(drawn.data.labels) / drawn.sequences
    out = model(**given)
    if drawn.options["loss_tile"] == "off":
        held = {name: shard_sequence(x, group=group) for name, x in batch.items() if name == "attention_mask"}
        found.outputs[f"logits {number}"] = _real(out.logits, held)
        found.places[f"logits {number}"] = {1: shard_sequence(torch.arange(drawn.data.tokens)[None], group=group)[0]}
    loss: torch.Tensor = out.loss if own else dfa_hf.causal_lm_loss(out.logits, labels, group=group)
    return loss


def _between(drawn: TransformersDraw, model: Any, number: int) -> None:
    """Run something else before the backward, in "anything" not the same on every rank."""
    if not drawn.between:
        return
    doings = [*BETWEEN][1:] if drawn.between == "anything" else [drawn.between]
    model.eval()
    BETWEEN[doings[(number + dist.get_rank()) % len(doings)]](model, drawn.data.batch(number)["input_ids"].flip(1))
    model.train()


@torch.no_grad()
def _evaluate(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids)


def _alone_here(model: Any, ids: torch.Tensor) -> None:
    with dfa_hf.local_attention(model):
        _evaluate(model, ids)


def _in_a_thread(model: Any, ids: torch.Tensor) -> None:
    ThreadPoolExecutor(1).submit(_alone_here, model, ids).result()


def _generate(model: Any, ids: torch.Tensor) -> None:
    with dfa_hf.local_attention(model):
        model.generate(ids, max_new_tokens=2, do_sample=False)


def _fail(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError), dfa_hf.local_attention(model):
        model(input_ids=ids, prompt_tree=([ids.shape[1]], [-1]))


BETWEEN = {
    "evaluation": _evaluate, "local": _alone_here, "thread": _in_a_thread, "generation": _generate, "failure": _fail,
}  # fmt: skip
"""All but the first are of a rank by itself."""
