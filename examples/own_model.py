"""Train a transformer of your own: attention is one function, all else treats each token alone.

torchrun --nproc-per-node 2 examples/own_model.py                            # CPU ranks, or one GPU each
torchrun --nproc-per-node 8 examples/own_model.py --seq-length 262144 --hidden 2048 --layers 16 --tensorboard runs/own
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import dist_flash_attn_func, local_positions, shard_sequence
from step_log import StepLog


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # Each of (batch, tokens of this rank, heads, head_dim); the other ranks' keys and values come by themselves.
        x = x + self.out(dist_flash_attn_func(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 128)) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.tokens(ids) + self.places(positions))))


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"seq-length": 512, "hidden": 128, "layers": 2, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tensorboard", help="a folder for TensorBoard")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    torch.manual_seed(0)
    model = Model(256, args.seq_length, args.hidden, args.layers).to(device)
    model = DistributedDataParallel(model)  # averages gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    text = torch.tensor(list(str(pydoc_data.topics.topics).encode()))  # Python's own manual, byte by byte
    positions = local_positions(args.seq_length, device=device)  # of this rank's tokens in the whole sequence
    per_token = sum(p.numel() for p in model.parameters()) + args.layers * args.hidden * args.seq_length
    log = StepLog(tokens=args.seq_length, flops=6 * per_token * args.seq_length, tensorboard=args.tensorboard)
    for step in range(args.steps):
        start = step * args.seq_length % (len(text) - args.seq_length - 1)
        whole = text[start : start + args.seq_length + 1].to(device)  # every rank takes the SAME sequence ...
        ids, labels = (shard_sequence(x[None]) for x in (whole[:-1], whole[1:]))  # ... and its part: shift labels first
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = nn.functional.cross_entropy(model(ids, positions).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        log.step(loss / dist.get_world_size(), grad_norm=norm)
    del model  # DDP behind its group would wait for threads that wait for Python
    dist.destroy_process_group()


main()
