"""Train a model of your own in a DeepSpeed pipeline: the data-parallel ranks of each stage share a sequence.

torchrun --nproc-per-node 4 examples/deepspeed_pipeline.py                   # two stages, two ranks for a sequence
"""

import argparse
import pydoc_data.topics

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from dfa_megatron import DistFlashAttention, local_positions, shard_sequence
from dfa_megatron import deepspeed as dfa_ds
from step_log import StepLog

WIDTH, HEADS, LAYERS = 128, 4, 4


class Embedding(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(length, WIDTH)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.tokens(batch[0]) + self.places(batch[1])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = DistFlashAttention(causal=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if not cuda:  # or DeepSpeed compiles an operator for inference, which takes minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    mesh = dfa_ds.make_mesh(stages=args.stages)  # all ranks of a stage share a sequence; `size=` makes smaller groups
    layers = [Embedding(args.seq_length), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 256)]
    module = PipelineModule(layers, num_stages=args.stages, loss_fn=lambda *of: dfa_ds.loss(*of, group=mesh.group))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "dist_flash_attention": {"enabled": True, "checkpoint": "remat"},
    }
    engine, *_ = dfa_ds.initialize(model=module, config=settings)
    text = torch.tensor(list(str(pydoc_data.topics.topics).encode()), device=engine.device)  # Python's manual, by bytes
    log = StepLog(tokens=2 * args.seq_length, tensorboard=args.tensorboard)
    for step in range(args.steps):
        batches = []
        for row in text.split(args.seq_length)[2 * step : 2 * step + 2]:  # the same on all ranks of a group
            ids = shard_sequence(row[None], group=mesh.group)
            places = local_positions(len(row), group=mesh.group, device=row.device)
            batches.append(((ids, places.expand_as(ids)), row[None]))
        log.step(engine.train_batch(iter(batches)), grad_norm=engine.get_global_grad_norm() or float("nan"))
    dist.barrier()
    dist.destroy_process_group()


main()
