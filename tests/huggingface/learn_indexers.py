"""Train a small GLM-5 and its indexers on one rank and on several: python -m tests.huggingface.learn_indexers."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from dfa_megatron import huggingface as dfa_hf
from tests.huggingface.sweep.tiny import build
from tests.support.workers import run_ranks

Losses = list[tuple[float, float]]
"""The model's loss and the indexers', of every step."""


def train(rank: int, ranks: int, steps: int) -> Losses:
    """Train on 50 tokens a row of a text that repeats itself."""
    model = dfa_hf.distribute_attention(build("glm_moe_dsa"))
    dfa_hf.train_indexers(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, losses = torch.Generator().manual_seed(0), Losses()
    text = torch.randint(1, 90, (64,), generator=generator)
    for _ in range(steps):
        ids = torch.stack([text.roll(-int(at))[:50] for at in torch.randint(0, 64, (2,), generator=generator)])
        optimizer.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        optimizer.step()
        losses.append((float(out.loss), float(dfa_hf.indexer_loss(model))))
    return losses


def main() -> None:
    """Print the losses, and how far those of several ranks are from those of one."""
    parser = argparse.ArgumentParser(prog="python -m tests.huggingface.learn_indexers", description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    asked = parser.parse_args()
    one, several = (run_ranks(ranks, train, asked.steps, timeout=3600.0)[0] for ranks in (1, asked.ranks))
    for step in range(0, asked.steps, 20):
        print(f"step {step + 1:4}  loss {one[step][0]:.6f}  indexers {one[step][1]:.6f}")
    farthest = [max(abs(x[i] - y[i]) for x, y in zip(one, several, strict=True)) for i in range(2)]
    print(f"on {asked.ranks} ranks at most {farthest[0]:.1e} and {farthest[1]:.1e} off")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
