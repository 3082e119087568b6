"""Let each rank of a group compute its tokens' part of the divergence in TRL's DistillationTrainer.

TRL makes the logits of a student and a teacher from their hidden states, chunk by chunk. Here each rank has those of
its own tokens, and the loss is the sum of the ranks' parts over the number of all tokens that count.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext, enter, forward_of, leave
from dfa_megatron.huggingface.distribute import local_attention, transformers_model
from dfa_megatron.huggingface.join_outputs import rolled
from dfa_megatron.huggingface.loss import as_whole
from dfa_megatron.huggingface.share_rollouts import replaced
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import shard_sequence


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
        context.local = False
        try:
            return method(*args)
        finally:
            context.local = True
            enter(model, entered)

    with local_attention(model):
        return own(wrapper, model, within, *args)


def _states(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
    """Return the hidden states of this rank's tokens, with the padding before prompts behind the tokens."""
    padding = _padding(attention_mask)
    decoder = transformers_model(model).get_decoder()
    found: torch.Tensor = decoder(
        input_ids=rolled(input_ids, padding), attention_mask=rolled(attention_mask, padding), use_cache=False
    ).last_hidden_state
    return found


def _padding(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.cumsum(1) == 0).sum(1)


def _loss(trainer: Any, own: Callable[..., Any], student: Any, inputs: dict[str, Any], count: Any) -> Any:
    """Compute TRL's loss with the divergence of this rank's tokens in place of that of all."""
    context: LayerContext = getattr(transformers_model(student), CONTEXT)
    of_trl = vars(sys.modules[trainer.compute_loss.__module__])
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    part = functools.partial(_part, of_trl["_chunked_divergence_loss"], context, mask)
    with replaced(of_trl, _chunked_divergence_loss=part):
        return own(student, inputs, count)


def _part(
    own: Callable[..., Any], context: LayerContext, attention_mask: torch.Tensor, *given: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of all tokens, whose gradient is P times this rank's part, their entropies' sum and number.

    given: hidden states and weights of student and teacher, the mask of the tokens that count (rows, completions),
    and what TRL gives beside them. A token counts where the one before it predicts it.
    """
    *states, mask, beta = given
    predicting = torch.nn.functional.pad(mask, (attention_mask.shape[1] - 1 - mask.shape[1], 1))
    mine = shard_sequence(rolled(predicting, _padding(attention_mask)), group=context.group)
    number = mask.sum()
    count = named.pop("num_items_in_batch")
    count = number.clamp(min=1) if count is None else count
    loss, entropy, _ = own(*states, mine, beta, num_items_in_batch=count / context.size, **named)
    entropy = entropy.detach()
    if context.size > 1:
        dist.all_reduce(entropy, group=resolve(context.group))
    return as_whole(loss, context.group), entropy, number
