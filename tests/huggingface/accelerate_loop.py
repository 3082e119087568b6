"""A loop around accelerate as users write it: accumulation, evaluation, and going on amid an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

Batch = Mapping[str, torch.Tensor]


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
