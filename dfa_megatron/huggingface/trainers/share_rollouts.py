"""Let the ranks of a group generate and score rollouts as one process, in TRL's GRPOTrainer and RLOOTrainer.

The prompts, random numbers and so the completions of a group are the same. Rewards, and all that is gathered, are of
each group's first rank, so that rewards that are random or come from elsewhere cannot differ within a group.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError

_LEARNED = {"wpe", "embed_positions", "position_embeddings", "position_embedding"}
"""Names of tables of learned positions in transformers."""


def generates(trainer: Any) -> bool:
    """Return whether a Trainer trains on rollouts of its own."""
    return hasattr(trainer, "_generate_and_score_completions")


def check_rollouts(trainer: Any) -> None:
    """Refuse rollouts that others than the model itself generate, or more than text, and learned positions.

    Raises:
        UnsupportedError: names them.
    """
    asked = {
        "use_vllm": trainer.args.use_vllm,
        "use_transformers_continuous_batching": trainer.args.use_transformers_continuous_batching,
        "rollout_func": getattr(trainer, "rollout_func", None),
        "tools": getattr(trainer, "tools", None),
        "environment_factory": getattr(trainer, "environment_factories", None),
        "a processor of images": trainer._is_vlm,
    }
    if found := ", ".join(name for name, value in asked.items() if value):
        raise UnsupportedError(
            f"{found} in {type(trainer).__name__}",
            "the ranks of a sequence would get different rollouts",
            "text that the model's own generate continues",
        )
    modules = trainer.model.named_modules()
    if any(name.rpartition(".")[2] in _LEARNED and isinstance(module, torch.nn.Embedding) for name, module in modules):
        raise UnsupportedError(
            f"learned positions in {type(trainer).__name__}",
            "TRL counts positions from the padding before a prompt, and these ranks count them from the prompt",
            "a model with rotary positions",
        )


def share_rollouts(trainer: Any, size: int) -> None:
    """Let groups of `size` ranks count as one process each, in what TRL has counted when the Trainer was made.

    Raises:
        UnsupportedError: the answers to a prompt would not fit into the batches of all groups.
    """
    from transformers import set_seed

    args, accelerator = trainer.args, trainer.accelerator
    groups = accelerator.num_processes
    rows = args.per_device_train_batch_size * groups * args.steps_per_generation
    in_evaluation = args.per_device_eval_batch_size * groups if args.eval_strategy != "no" else 0
    if rows % trainer.num_generations or in_evaluation % trainer.num_generations_eval:
        raise UnsupportedError(
            f"batches of {rows} and {in_evaluation} answers by {groups} groups of {size} ranks",
            f"num_generations, {trainer.num_generations} and {trainer.num_generations_eval}, does not divide them",
            "larger batches",
        )
    args.generation_batch_size = rows
    kept: Callable[[], deque[Any]] = functools.partial(deque, maxlen=rows)
    for name, held in trainer._logs.items():
        trainer._logs[name] = defaultdict(kept) if isinstance(held, dict) else kept()
    set_seed(args.seed + accelerator.process_index // size)  # TRL's is of the rank
    own = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = functools.partial(_by_groups, trainer, own)


def _by_groups(trainer: Any, own: Callable[[Any], Any], inputs: Any) -> Any:
    """Generate with the functions of accelerate that TRL has imported bound to the groups."""
    accelerator, module = trainer.accelerator, sys.modules[trainer.compute_loss.__module__]
    theirs = {name: getattr(module, name) for name in ("gather", "gather_object")}
    first = accelerator.process_index % accelerator._dfa_sharing.size == 0
    vars(module)["gather"] = accelerator.gather
    vars(module)["gather_object"] = lambda objects: theirs["gather_object"](objects if first else [])
    try:
        with accelerator.indexed_by_groups():
            return own(inputs)
    finally:
        vars(module).update(theirs)
