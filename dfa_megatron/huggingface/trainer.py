"""Let HF Trainer, or a subclass such as TRL's SFTTrainer, train with sequences that ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.huggingface.accelerator import check_given, refuse_objects, share_sequences
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext
from dfa_megatron.huggingface.distribute import transformers_model
from dfa_megatron.huggingface.join_outputs import classifies
from dfa_megatron.huggingface.loss import follow_router
from dfa_megatron.huggingface.share_rollouts import check_rollouts, generates, share_divergence, share_rollouts
from dfa_megatron.huggingface.tiled_head import causal_loss
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.runtime.comm.compared import compared
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.counters import stats


def distribute_trainer(
    trainer: Any, *, size: int | None = None, config: TrainingConfig | None = None, unlisted: bool = False
) -> None:
    """Share each sequence of a Trainer among consecutive ranks, in training and evaluation; a collective call.

    Losses, gradients, gradient accumulation and evaluation are those of one process for each group of ranks, with
    uneven labels and packed documents too. Call it after the Trainer is made, and before `train` or `evaluate`;
    it may be called again, with the same size.

    Args:
        trainer: a `transformers.Trainer`, with DDP, FSDP2 or DeepSpeed. Its data set and collator make whole sequences.
        size, config, unlisted: as of `distribute_accelerator`.

    Raises:
        UnsupportedError: the Trainer or its model needs something unsupported; the message names it.
    """
    check_given("distribute_trainer", trainer, "compute_loss")
    _check(trainer, TrainingConfig.of(config))
    accelerator, arguments = trainer.accelerator, trainer.args
    if arguments.ddp_find_unused_parameters is None:
        # Trainer has DDP look for unused parameters unless it checkpoints itself.
        arguments.ddp_find_unused_parameters = False
    if arguments.use_liger_kernel:  # else Trainer replaces the forward when it trains, after its names were followed
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, arguments.liger_kernel_config)
    scores = _name_of(trainer) in _OF_SCORES
    share = functools.partial(share_sequences, accelerator, config=config, loop=False, scores=scores, unlisted=unlisted)
    size = share(trainer.model, size)
    if "prediction_step" not in vars(trainer):
        trainer.prediction_step = functools.partial(_predict, trainer, trainer.prediction_step)
    if accelerator.state.num_processes == 1:
        return
    model = transformers_model(trainer.model)
    if trainer.label_smoother is not None:  # the model's own loss is the same, and each rank has its labels' part
        model.loss_function = functools.partial(causal_loss, label_smoothing=trainer.label_smoother.epsilon)
        trainer.label_smoother = None
    for name in ("ref_model", "teacher_model"):
        if (beside := getattr(trainer, name, None)) is not None:
            share(beside, size)
    if getattr(trainer, "aux_loss_enabled", False):  # TRL takes Mixtral's function for all
        from transformers import MixtralForCausalLM

        follow_router(MixtralForCausalLM.forward)
    if "get_cp_size" in vars(trainer):  # called again: what follows is done
        return
    # Before the trackers, which then log its numbers with the loss.
    trainer.callback_handler.callbacks.insert(0, _stats_logger())
    trainer.get_cp_size = lambda: size
    trainer._prepare_context_parallel_inputs = functools.partial(_inputs, trainer)
    flops = trainer.floating_point_ops
    trainer.floating_point_ops = lambda inputs: flops(inputs) / size
    trainer._get_num_items_in_batch = functools.partial(_count, trainer)
    if generates(trainer):
        share_rollouts(trainer, size)
    if _name_of(trainer) == _DISTILLATION:
        share_divergence(trainer)
    trainer.gather_function = accelerator.gather_for_metrics


def _predict(
    trainer: Any, own: Callable[..., Any], model: Any, inputs: Any, prediction_loss_only: bool, **more: Any
) -> Any:
    """Predict as a Trainer does, whose model knows whether it reads logits."""
    context: LayerContext = getattr(transformers_model(trainer.model), CONTEXT)
    with for_a_while(context, reads_logits=not prediction_loss_only):
        return own(model, inputs, prediction_loss_only, **more)


def _inputs(trainer: Any, model: Any, inputs: Any) -> tuple[Any, Any]:
    """Leave a step's inputs whole; refuse a loss that was set since."""
    _check_loss(trainer)
    return nullcontext, inputs


def _stats_logger() -> Any:
    """Return a callback that adds the numbers of `stats` to what a Trainer logs in training."""
    from transformers import TrainerCallback

    class Stats(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs is not None and "loss" in logs:
                logs |= {name: value for name, value in stats().items() if not isinstance(value, str)}

    return Stats()


def _check(trainer: Any, options: TrainingConfig) -> None:
    """Refuse what a Trainer was told to do with models, losses or batches."""
    arguments, checkpoint = trainer.args, options.checkpoint
    _check_loss(trainer)
    if generates(trainer):
        check_rollouts(trainer)
    if arguments.eval_use_gather_object:
        refuse_objects()
    if trainer.model_init is not None:
        why = "the Trainer makes another model when it trains, which would not be distributed"
        raise UnsupportedError("model_init", why, "Trainer(model=...)")
    if getattr(arguments, "train_sampling_strategy", None) == "batch_rebalance":
        why, instead = (
            "it would give each rank of a sequence another batch",
            "'random', 'sequential', 'group_by_length'",
        )
        raise UnsupportedError("train_sampling_strategy='batch_rebalance'", why, instead)
    if getattr(arguments, "predict_with_generate", False):
        why = "generation needs the keys of whole sequences on one rank"
        instead = "evaluation without it, or model.generate within dfa_megatron.huggingface.local_attention(model)"
        raise UnsupportedError("predict_with_generate", why, instead)
    if options.checkpoints_layers and arguments.gradient_checkpointing:
        why, instead = "the Trainer would replace the former", "checkpoint='auto'"
        raise UnsupportedError(f"checkpoint={checkpoint!r} with gradient_checkpointing=True", why, instead)
    if options.checkpoints_layers and generates(trainer):
        why, instead = "they replace it when they generate", "checkpoint='auto', and gradient_checkpointing=True"
        raise UnsupportedError(f"checkpoint={checkpoint!r} with GRPO, RLOO or distillation", why, instead)


def _check_loss(trainer: Any) -> None:
    """Refuse losses that do not add up over the ranks."""
    if trainer.compute_loss_func is not None:
        why = "it would compare the labels of all tokens with the logits of this rank's"
        instead = "model.loss_function = a function that dfa_megatron.huggingface.sums_tokens marks"
        raise UnsupportedError("compute_loss_func", why, instead)
    name = _name_of(trainer)
    routed = getattr(trainer.model.config, "output_router_logits", False)
    if trainer.label_smoother and (routed or name in _OF_SCORES or any(map(classifies, trainer.model.modules()))):
        raise UnsupportedError(
            "label_smoothing_factor with output_router_logits, classifiers or TRL's trainers",
            "Trainer leaves a router's loss out of it, and smooths scores of sequences; TRL's need all tokens' logits",
            "label_smoothing_factor=0, or Trainer and a language model without a router's loss",
        )
    if name in _OF_SCORES and "fused_lm_head" in transformers_model(trainer.model).forward.__code__.co_varnames:
        return  # TRL has put its head into the model, whose outputs are joined
    if name not in (_OF_TRAINER, _REWARD, _DISTILLATION):
        raise UnsupportedError(
            name,
            "what it makes of logits or log-probabilities would be of this rank's tokens alone, and training wrong",
            "Trainer's own, and a model.loss_function marked by sums_tokens; SFT, DPO, KTO, reward, GRPO, RLOO or "
            "distillation of TRL 1.16; distribute_accelerator and a loop of your own over the model's loss",
        )


def _name_of(trainer: Any) -> str:
    """Return the method by which a Trainer computes its loss."""
    own = trainer.compute_loss
    return f"{getattr(own, '__module__', '')}.{getattr(own, '__qualname__', repr(own))}"


_OF_TRAINER = "transformers.trainer.Trainer.compute_loss"
_REWARD, _DISTILLATION, *_OF_SCORES = (
    f"trl.trainer.{x.lower()}_trainer.{x}Trainer.compute_loss"
    for x in ("Reward", "Distillation", "SFT", "DPO", "KTO", "GRPO", "RLOO")
)
"""TRL's methods. The last five make a loss of each token's log-probability: every rank makes it of all tokens."""


def _count(trainer: Any, batches: Sequence[Any], device: torch.device) -> Any:
    """Count the labels of a step, of all its micro-batches and groups, as Trainer does."""
    if not batches or "labels" not in batches[0] or not trainer.model_accepts_loss_kwargs:
        return None
    counted = [batch["shift_labels"] if "shift_labels" in batch else batch["labels"][..., 1:] for batch in batches]
    count = torch.stack([(labels != IGNORED).sum() for labels in counted]).sum().to(device)
    if trainer.args.average_tokens_across_devices:
        context: LayerContext = getattr(transformers_model(trainer.model), CONTEXT)
        over = channel_of(context.group, verify=context.options.verify == "on")  # a rank that is not there is named
        here = torch.device("cpu")  # where ranks meet before they go on
        with compared("the labels of a step", over, {}, here).running(0, here):
            count = trainer.accelerator.gather(count).sum()
    return count.clamp(min=1) if trainer.model.training else count
