"""Train a GPTModel or a HybridModel of Megatron-Core in a loop of your own, with distributed attention.

torchrun --nproc-per-node 2 examples/megatron_loop.py             # CPU ranks, or one GPU each
torchrun --nproc-per-node 2 examples/megatron_loop.py --hybrid    # needs triton; on GPUs mamba-ssm, Transformer Engine
"""

import argparse
import os
import pydoc_data.topics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from dfa_megatron import MegatronConfig, StepLog, training_flops
from dfa_megatron.megatron import distribute_attention, shard_batch
from dfa_megatron.megatron.cpu import mamba, stand_in

parser = argparse.ArgumentParser()
parser.add_argument("--seq-length", type=int, default=512)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--hybrid", action="store_true")
parser.add_argument("--tensorboard", help="a folder for TensorBoard")
args = parser.parse_args()

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    stand_in.use_cpu()  # Megatron calls CUDA in many places
device = torch.device("cuda" if cuda else "cpu")
dist.init_process_group("nccl" if cuda else "gloo")
parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=2, normalization="RMSNorm",
    add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, bf16=cuda,
    params_dtype=torch.bfloat16 if cuda else torch.float32, use_cpu_initialization=not cuda,
    context_parallel_size=dist.get_world_size(), cp_comm_type="dfa", gradient_accumulation_fusion=False,
    calculate_per_token_loss=True,  # right for uneven loss masks too
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,  # attention still runs once
)  # fmt: skip
options = MegatronConfig(data_layout="contiguous")
if args.hybrid:
    # Their names from Megatron-Core 0.18 on: models.hybrid, HybridModel, hybrid_stack_spec, hybrid_layer_pattern.
    from megatron.core.models.mamba.mamba_model import MambaModel

    if cuda:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as stack
    else:
        mamba.use_mamba_stand_ins()
        stack = mamba.stack_spec(config)
    spec = distribute_attention(stack, config, config=options)
    model = MambaModel(config, spec, 256, args.seq_length, hybrid_override_pattern="M*-M")
else:
    spec = distribute_attention(get_gpt_layer_local_spec(normalization="RMSNorm"), config, config=options)
    model = GPTModel(config, spec, 256, args.seq_length, position_embedding_type="rope")
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(device))
config.finalize_model_grads_func = finalize_model_grads
adam = OptimizerConfig(optimizer="adam", lr=3e-4, clip_grad=1.0, bf16=cuda, params_dtype=config.params_dtype)
optimizer = get_megatron_optimizer(adam, [model])
text = torch.tensor(list(str(pydoc_data.topics.topics).encode()))  # Python's own manual, byte by byte


def batches() -> Iterator[dict[str, Any]]:
    for step in range(args.steps):  # every rank of the group brings the same whole batch; samplers count DP ranks
        row = text[step * args.seq_length :][: args.seq_length + 1][None].to(device)
        places = torch.arange(args.seq_length, device=device)[None]
        whole = {"tokens": row[:, :-1], "labels": row[:, 1:], "position_ids": places}
        yield shard_batch(whole, parallel_state.get_context_parallel_group(), options)


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total = losses.float().sum()  # and a count: a loss alone Megatron would take for that of all ranks
        return total, torch.tensor(losses.numel(), device=device), {"loss": total.detach() / args.seq_length}

    return losses, loss_of


parameters = sum(p.numel() for name, p in model.named_parameters() if "word_embeddings" not in name)
flops = training_flops(config, parameters, args.seq_length, args.seq_length)
log = StepLog(tokens=args.seq_length, flops=flops, tensorboard=args.tensorboard)
iterator = batches()
for _ in range(args.steps):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    (report,) = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=1,
        seq_length=args.seq_length, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    _, norm, _ = optimizer.step()
    dist.all_reduce(report["loss"], dist.ReduceOp.SUM)
    log.step(report["loss"], grad_norm=norm)
dist.destroy_process_group()
