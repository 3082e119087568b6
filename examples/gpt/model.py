"""A Megatron-Core GPT whose attention is distributed: configuration, spec, model, gradient reduction, optimizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from dfa_megatron import MegatronConfig
from dfa_megatron.megatron import distribute_attention
from gpt.flags import Sizes


@dataclass(frozen=True, slots=True)
class Trainer:
    """Hold the objects of a training step."""

    config: Any
    model: Any
    optimizer: Any
    scheduler: Any


def build(args: argparse.Namespace, sizes: Sizes, options: MegatronConfig, vocabulary: int) -> Trainer:
    """Build everything for this rank; the process group and Megatron's parallel state must be there."""
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    config = _config(args, sizes)
    # The one line that puts distributed attention into the model.
    spec = distribute_attention(get_gpt_layer_local_spec(normalization="RMSNorm"), config, config=options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=_padded(vocabulary, sizes.tensor),
        max_sequence_length=args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=False,
    )
    if torch.cuda.is_available():
        model.cuda()
    if sizes.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    model = DistributedDataParallel(config, reduction, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer, scheduler = _optimizer(args, sizes, model)
    config.grad_scale_func = optimizer.scale_loss
    return Trainer(config, model, optimizer, scheduler)


def _config(args: argparse.Namespace, sizes: Sizes) -> TransformerConfig:
    dtype = torch.bfloat16 if sizes.bf16 else torch.float32
    full = args.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size or 4 * args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups or args.num_attention_heads,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        sequence_parallel=args.sequence_parallel,
        cp_comm_type="dfa",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=sizes.bf16,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Fused kernels that come with Apex or Transformer Engine, neither of which this example needs.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        recompute_granularity="full" if full else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
    )


def _optimizer(args: argparse.Namespace, sizes: Sizes, model: Any) -> tuple[Any, Any]:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=min(args.min_lr, args.lr),
            weight_decay=args.weight_decay,
            adam_beta2=0.95,
            clip_grad=args.clip_grad,
            bf16=sizes.bf16,
            params_dtype=torch.bfloat16 if sizes.bf16 else torch.float32,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=min(args.min_lr, args.lr),
        lr_warmup_steps=min(args.lr_warmup_iters, args.train_iters - 1),
        lr_decay_steps=args.train_iters,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a run that goes on may be longer
    )
    scheduler.step(1)  # the first step would otherwise have learning rate 0
    return optimizer, scheduler


def _padded(vocabulary: int, tensor: int) -> int:
    """Each tensor-parallel rank holds the same number of rows of the vocabulary."""
    return -(-vocabulary // tensor) * tensor
