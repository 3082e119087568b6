"""Let the ranks of a group generate and score rollouts as one process, in TRL's GRPO, RLOO and distillation.

The model samples with its former attention, each rank by itself, or a server of vLLM does. The completions, rewards,
and all that is gathered, are of each group's first rank, so that what is random cannot differ within a group.

Distillation makes the logits of a student and a teacher from their hidden states, chunk by chunk: each rank has those
of its own tokens, and the loss is the sum of the ranks' parts over the number of all tokens that count.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext, enter, forward_of, leave
from dfa_megatron.huggingface.distribute import local_attention, transformers_model
from dfa_megatron.huggingface.join_outputs import left_padding, rolled
from dfa_megatron.huggingface.loss import as_whole
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import shard_sequence

_LEARNED = {"wpe", "position_embeddings", "position_embedding"}
"""Names of tables of learned positions in transformers."""


def generates(trainer: Any) -> bool:
    """Return whether a Trainer trains on rollouts of its own."""
    return hasattr(trainer, "_generate_and_score_completions")


def check_rollouts(trainer: Any) -> None:
    """Refuse rollouts that the ranks of a group would not have in common, or of images, and learned positions."""
    asked = {
        "vllm_mode='colocate'": trainer.args.use_vllm and trainer.args.vllm_mode != "server",
        "use_transformers_continuous_batching": getattr(trainer.args, "use_transformers_continuous_batching", False),
        "rollout_func": getattr(trainer, "rollout_func", None),
        "tools": getattr(trainer, "tools", None),
        "environment_factory": getattr(trainer, "environment_factories", None),
        "a processor of images": trainer._is_vlm,
    }
    if found := ", ".join(name for name, value in asked.items() if value):
        raise UnsupportedError(
            f"{found} in {type(trainer).__name__}",
            "the ranks of a sequence would get different rollouts",
            "text that the model's own generate continues, or vllm_mode='server'",
        )
    modules = trainer.model.named_modules()
    if any(name.rpartition(".")[2] in _LEARNED and isinstance(module, torch.nn.Embedding) for name, module in modules):
        raise UnsupportedError(
            f"learned positions in {type(trainer).__name__}",
            "TRL counts positions from the padding before a prompt, and these ranks count them from the prompt",
            "a model with rotary positions",
        )


def share_rollouts(trainer: Any, size: int) -> None:
    """Let groups of `size` ranks count as one process each, in what TRL has counted when the Trainer was made."""
    from transformers import set_seed

    args, accelerator = trainer.args, trainer.accelerator
    groups = accelerator.num_processes
    rows = args.per_device_train_batch_size * groups * args.gradient_accumulation_steps
    if hasattr(trainer, "num_generations"):  # not of distillation
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
    """Generate with the functions of accelerate that TRL has imported bound to the groups, and with `_sampled`."""
    accelerator, model = trainer.accelerator, transformers_model(trainer.model)
    first = accelerator.process_index % accelerator._dfa_size == 0
    of_trl: Any = sys.modules[trainer.compute_loss.__module__]
    gather_object = of_trl.gather_object

    def of_firsts(objects: list[Any]) -> list[Any]:
        found: list[Any] = gather_object(objects if first else [])
        return found

    of_vllm = sys.modules[type(trainer.vllm_generation).__module__] if trainer.use_vllm else None
    with (
        for_a_while(of_trl, gather=accelerator.gather, gather_object=of_firsts),
        for_a_while(of_vllm, gather_object=of_firsts) if of_vllm else nullcontext(),
        for_a_while(model, generate=functools.partial(_sampled, model, model.generate)),
        accelerator.indexed_by_groups(),
    ):
        return own(inputs)


def _sampled(model: Any, own: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the tokens that the first rank of a group samples: another's rounding may choose others."""
    context: LayerContext = getattr(model, CONTEXT)
    with local_attention(model):
        ids = own(*args, **kwargs)
    if context.size > 1:
        group, length = resolve(context.group), torch.tensor(ids.shape[1], device=ids.device)
        dist.broadcast(length, group=group, group_src=0)
        ids = torch.nn.functional.pad(ids, (0, int(length) - ids.shape[1])).contiguous()  # or cut
        dist.broadcast(ids, group=group, group_src=0)
    return ids


def share_divergence(trainer: Any) -> None:
    """Let a DistillationTrainer, whose student and teacher are distributed, compute its loss by parts."""
    trainer._get_last_hidden_state = _states
    trainer._compute_loss = functools.partial(_loss, trainer, trainer._compute_loss)
    trainer._forward_redirection = functools.partial(_redirected, trainer._forward_redirection)


def _redirected(own: Callable[..., Any], wrapper: Any, model: Any, method: Callable[..., Any], *args: Any) -> Any:
    """Run a method in place of a model's forward, whose hooks let the arguments pass as those of a local call."""
    if transformers_model(model) is not model:  # PEFT's, which has no hooks
        return own(wrapper, model, method, *args)

    def within(*args: Any) -> Any:
        context, entered = getattr(model, CONTEXT), forward_of(model)
        leave(model)
        try:
            with for_a_while(context, local=False):
                return method(*args)
        finally:
            enter(model, entered)

    with local_attention(model):
        return own(wrapper, model, within, *args)


def _states(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
    """Return the hidden states of this rank's tokens, with the padding before prompts behind the tokens."""
    padding = left_padding(attention_mask)
    whole = {"input_ids": rolled(input_ids, padding), "attention_mask": rolled(attention_mask, padding)}
    found: torch.Tensor = transformers_model(model).get_decoder()(**whole, use_cache=False).last_hidden_state
    return found


def _loss(trainer: Any, own: Callable[..., Any], student: Any, inputs: dict[str, Any], count: Any) -> Any:
    """Compute TRL's loss with the divergence of this rank's tokens in place of that of all."""
    context: LayerContext = getattr(transformers_model(student), CONTEXT)
    of_trl: Any = sys.modules[trainer.compute_loss.__module__]
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    part = functools.partial(_part, of_trl._chunked_divergence_loss, context, mask)
    with for_a_while(of_trl, _chunked_divergence_loss=part):
        return own(student, inputs, count)


def _part(
    own: Callable[..., Any], context: LayerContext, attention_mask: torch.Tensor, *given: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of all tokens, whose gradient is P times this rank's part, their entropies' sum and number.

    given: hidden states and weights of both, the mask of the tokens that count (rows, completions), and beta.
    """
    *states, mask, beta = given
    predicting = torch.nn.functional.pad(mask, (attention_mask.shape[1] - 1 - mask.shape[1], 1))
    mine = shard_sequence(rolled(predicting, left_padding(attention_mask)), group=context.group)
    number = mask.sum()
    count = named.pop("num_items_in_batch")
    count = number.clamp(min=1) if count is None else count
    loss, entropy, _ = own(*states, mine, beta, num_items_in_batch=count / context.size, **named)
    entropy = entropy.detach()
    if context.size > 1:
        dist.all_reduce(entropy, group=resolve(context.group))
    return as_whole(loss, context.group), entropy, number
