"""Train a Hugging Face model in a loop around accelerate, with DDP or FSDP2, and without DeepSpeed or Trainer.

A toy on four CPU ranks, and a model from the hub on eight GPUs, two sequences at a time:

    torchrun --nproc-per-node 4 examples/train_accelerate.py --size 2 --save runs/state
    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
        --mixed_precision bf16 --use_parallelism_config --parallelism_config_cp_size 4 \\
        --parallelism_config_dp_shard_size 2 examples/train_accelerate.py --model Qwen/Qwen3-8B --data book.txt \\
        --seq-length 131072

A second run with the same `--save` goes on behind the last step, in the middle of an epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf
from gpt.text import Tokens, sample
from hf_model import add_arguments, build

Batch = Mapping[str, torch.Tensor]


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Yield whole sequences of a text."""

    def __init__(self, tokens: Tokens, length: int, first: int, count: int) -> None:
        self.tokens, self.length, self.first, self.count = tokens, length, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = sample(self.tokens, self.length, seed=0, indices=[self.first + index])["tokens"][0]
        return {"input_ids": ids, "labels": ids}


class Progress:
    """Count steps, for accelerate to save and load."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved."""
        self.steps = state["steps"]


def start(accumulate: int, **more: Any) -> Accelerator:
    """Return an Accelerator whose steps all have as many micro-batches, and whose epochs have an order of their own."""
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
        **more,
    )


def labelled(batch: Batch) -> torch.Tensor:
    """Count the tokens that have a loss."""
    return (batch["labels"][:, 1:] != -100).sum()


def train_step(accelerator: Accelerator, model: Any, optimizer: Any, batches: Sequence[Batch]) -> torch.Tensor:
    """Train on the micro-batches of a step; return the mean loss of its labelled tokens, the same on every rank.

    `backward` divides by the micro-batches, and DDP and FSDP by the ranks.
    """
    count = accelerator.gather(torch.stack([labelled(batch) for batch in batches]).sum()).sum().clamp(min=1)
    share = count / accelerator.num_processes / accelerator.gradient_accumulation_steps
    total = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=share).loss
            accelerator.backward(loss)
            total += loss.detach() / accelerator.gradient_accumulation_steps
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean: torch.Tensor = accelerator.reduce(total, "mean")
    return mean


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> torch.Tensor:
    """Return the mean loss of all labelled tokens; the loader has one sequence a batch."""
    model.eval()
    sums = []
    for batch in loader:
        count = labelled(batch)
        loss = model(**batch).loss * count
        sums.append(accelerator.gather_for_metrics(torch.stack((loss, count.to(loss)))[None]))
    model.train()
    loss, count = torch.cat(sums).sum(dim=0).unbind()
    return loss / count


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, progress: Progress, until: int) -> None:
    """Train until so many steps are done since the first run, whole epochs or not."""
    accumulate = accelerator.gradient_accumulation_steps
    while progress.steps < until:
        epoch, done = divmod(progress.steps, len(loader) // accumulate)
        rest = accelerator.skip_first_batches(loader, done * accumulate)
        for each in (loader, rest):  # the order of an epoch; before accelerate 1.15 `rest` would begin with the first
            each.set_epoch(epoch)
        for step in zip(*[iter(rest)] * accumulate, strict=False):  # what is left of an epoch is less than a step
            loss = train_step(accelerator, model, optimizer, step)
            progress.steps += 1
            accelerator.print(f"step {progress.steps:4d}  loss {loss.item():.4f}", flush=True)
            if progress.steps == until:
                break


def main() -> None:
    """Train, print the loss of each step and of other text at the end, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--size", type=int, help="ranks that share a sequence; cp_size of accelerate, or all of them")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--save", type=Path, help="the folder that holds the state")
    args = parser.parse_args()
    accelerator, progress = start(args.accumulate), Progress()
    model, tokens = build(args)
    options = TrainingConfig(checkpoint="remat", loss_tile=4096)
    dfa_hf.distribute_accelerator(accelerator, model, size=args.size, config=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
    length, count = args.seq_length, 64
    data = torch.utils.data.DataLoader(Sequences(tokens, length, 0, count), batch_size=1, shuffle=True)
    others = torch.utils.data.DataLoader(Sequences(tokens, length, count, 8), batch_size=1)
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, data, others)
    accelerator.register_for_checkpointing(progress)
    if args.save and args.save.exists():
        accelerator.load_state(args.save)
    train(accelerator, model, optimizer, loader, progress, args.train_iters)
    accelerator.print(f"evaluation loss {evaluate(accelerator, model, others).item():.4f}")
    if args.save:
        accelerator.save_state(args.save)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
