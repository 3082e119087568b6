"""Train a GPTModel or a HybridModel of Megatron-Core in a loop of your own, with distributed attention.

torchrun --nproc-per-node 2 examples/megatron_loop.py             # CPU ranks, or one GPU each
torchrun --nproc-per-node 2 examples/megatron_loop.py --hybrid    # GPUs, Transformer Engine, mamba-ssm
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.elastic.multiprocessing.errors import record

from dfa_megatron import MegatronConfig
from dfa_megatron.megatron import distribute_attention, shard_batch, stand_in
from dfa_megatron.megatron.script.script_specs import default_stack_spec
from step_log import StepLog, training_flops


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    else:
        stand_in.use_cpu()  # Megatron calls CUDA in many places; .cuda() below does nothing then
    dist.init_process_group("nccl" if cuda else "gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4, hidden_size=256, num_attention_heads=8, num_query_groups=2, normalization="RMSNorm", bf16=cuda,
        params_dtype=torch.bfloat16 if cuda else torch.float32, use_cpu_initialization=not cuda, add_bias_linear=False,
        context_parallel_size=dist.get_world_size(), attention_dropout=0.0, hidden_dropout=0.0,
        calculate_per_token_loss=True, gradient_accumulation_fusion=False,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,  # attention still runs once
    )  # fmt: skip
    options = MegatronConfig(data_layout="contiguous")
    if args.hybrid:  # since Megatron-Core 0.19 also models.hybrid, HybridModel, hybrid_layer_pattern
        from megatron.core.models.mamba.mamba_model import MambaModel

        spec = distribute_attention(default_stack_spec(), config, config=options)
        model = MambaModel(config, spec, 256, args.seq_length, hybrid_override_pattern="M*-M")
    else:
        spec = distribute_attention(get_gpt_layer_local_spec(normalization="RMSNorm"), config, config=options)
        model = GPTModel(config, spec, 256, args.seq_length, position_embedding_type="rope")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())
    adam = OptimizerConfig(lr=3e-4, bf16=cuda, params_dtype=config.params_dtype)
    optimizer = get_megatron_optimizer(adam, [model])
    text = torch.tensor(list(str(pydoc_data.topics.topics).encode()))  # Python's own manual, byte by byte
    flops = training_flops(config, sum(p.numel() for p in model.parameters()), args.seq_length, args.seq_length)
    log = StepLog(tokens=args.seq_length, flops=flops, tensorboard=args.tensorboard)
    for step in range(args.steps):
        # Every rank of the group brings the same whole rows; samplers count data-parallel ranks.
        row = text[step * args.seq_length :][: args.seq_length + 1][None].cuda()
        places = torch.arange(args.seq_length)[None].cuda()
        whole = {"tokens": row[:, :-1], "labels": row[:, 1:], "position_ids": places}
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = model(**shard_batch(whole, parallel_state.get_context_parallel_group(), options)).float()
        losses.sum().backward()
        # Adds up gradients and tokens of all ranks, and divides. With a loss mask: sum losses * mask, count mask.sum().
        finalize_model_grads([model], torch.tensor(losses.numel()).cuda())
        _, norm, _ = optimizer.step()
        total = losses.detach().sum()
        dist.all_reduce(total)
        log.step(total / args.seq_length, grad_norm=norm)
    dist.destroy_process_group()


main()
