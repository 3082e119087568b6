"""Times Qwen3-4B's layers on rollouts of one prompt: as a prompt tree, and as documents that repeat the prompt.

    python -m benchmarks.tree_layers --out layers.json                                   # one GPU
    torchrun --nproc-per-node 2 -m benchmarks.tree_layers --out layers.json

First both are compared on short rollouts: the sum of the rollouts' losses, and its gradients. Then a forward and a
backward of each is timed on the slowest rank, with its peak of memory. The vocabulary is small: a head costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.bench import Flags, benchmark, clear_memory, dtype_on, flags_of, median_ms, peak_gib
from benchmarks.model_shapes import SHAPES
from dfa_megatron import TrainingConfig, shard_sequence, trees
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag

VOCABULARY = 1024


@dataclass(frozen=True)
class Shapes(Flags):
    """What is timed."""

    rollouts: int = flag(8, "of a prompt")
    tokens: int = flag(8192, "of a rollout with its prompt, on average")
    shares: tuple[float, ...] = flag((0.3, 0.6, 0.9), "of the prompt in a rollout", metavar="SHARE")
    layers: int = flag(4, "of the model")
    hidden: int = flag(2560, "its width; the rest is as in Qwen3-4B")
    kernel: str = flag("auto", "of ours")
    checkpoint: str = flag("remat", "of ours")
    repeats: int = flag(5, "of a time")


def model_of(shapes: Shapes, world: World) -> Any:
    """Return a distributed model with random weights, the same on every rank."""
    sizes = {"hidden": shapes.hidden, "intermediate": shapes.hidden * 19 // 5, "layers": shapes.layers}
    torch.manual_seed(0)
    model = replace(SHAPES["qwen3-4b"], **sizes, vocabulary=VOCABULARY, tied=False).model(1 << 20)
    model = model.to(world.device, dtype_on(world.device))
    options = TrainingConfig(kernel=shapes.kernel, checkpoint=shapes.checkpoint)
    return dfa_hf.distribute_attention(model, config=options)


def rollouts_of(count: int, tokens: int, share: float, seed: int) -> list[torch.Tensor]:
    """Return rollouts of one prompt; their answers vary by half to both sides."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCABULARY, (int(tokens * share),), generator=generator)
    lengths = (tokens - len(prompt)) * (0.5 + torch.rand(count, generator=generator))
    lengths = (lengths * (tokens - len(prompt)) * count / lengths.sum()).int().tolist()
    return [torch.cat([prompt, torch.randint(VOCABULARY, (n,), generator=generator)]) for n in lengths]


def as_tree(rollouts: list[torch.Tensor], world: World) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the model's inputs and the weights of this rank's tokens."""
    (pack,) = trees.from_rollouts(rollouts, multiple_of=world.size)
    return batch_of(pack.for_transformers(), world), shard_sequence(pack.weights).to(world.device)


def as_documents(rollouts: list[torch.Tensor], world: World) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the same of one row in which every rollout is a document, and padding another."""
    padding = -sum(map(len, rollouts)) % world.size
    rows = [*rollouts, *[torch.zeros(padding, dtype=torch.int64)] * bool(padding)]
    labels = [F.pad(row[1:], (1, 0), value=-100) for row in rollouts] + [torch.full((padding,), -100)]
    places = torch.cat([torch.arange(len(row)) for row in rows])
    whole = {"input_ids": torch.cat(rows)[None], "labels": torch.cat(labels)[None], "position_ids": places[None]}
    weights = F.pad(whole["labels"][:, 1:] != -100, (0, 1)).float()
    return batch_of(whole, world), shard_sequence(weights).to(world.device)


def batch_of(whole: dict[str, Any], world: World) -> dict[str, Any]:
    """Return a rank's inputs on its device."""
    return {name: x.to(world.device) if isinstance(x, torch.Tensor) else x for name, x in whole.items()}


def difference(model: Any, world: World) -> float:
    """Return the largest relative difference of the two ways in the sum of losses, and in any gradient's norm."""
    rollouts, found = rollouts_of(4, 200, 0.6, seed=1), []
    for batch, weights in (as_tree(rollouts, world), as_documents(rollouts, world)):
        model.zero_grad()
        logits = model(**batch).logits[0].float()
        labels = shard_sequence(F.pad(batch["labels"][:, 1:], (0, 1), value=-100))[0]
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights[0]).sum()
        loss.backward()
        grads = [x.grad.float() for x in model.parameters()]
        for x in (loss, *grads):
            if world.size > 1:
                dist.all_reduce(x.detach())
        found.append([loss.detach(), *grads])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))


def main(argv: list[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    with benchmark(shapes) as (world, report):
        model, limit = model_of(shapes, world), 5e-2 if world.cuda else 1e-4
        if (worst := difference(model, world)) > limit:
            raise SystemExit(f"a tree and its documents differ by {worst:.1e} (at most {limit:.0e}): nothing is timed")
        report.show(f"largest difference between a tree and its documents: {worst:.1e}")
        for share in shapes.shares:
            rollouts = rollouts_of(shapes.rollouts, shapes.tokens, share, seed=2)
            for name, make in (("documents", as_documents), ("tree", as_tree)):
                batch, _ = make(rollouts, world)

                def step(batch: dict[str, Any] = batch) -> None:
                    model.zero_grad()
                    model(**batch).loss.backward()

                step()
                clear_memory()
                row = {"share": share, "packed as": name, "tokens": batch["input_ids"].shape[1] * world.size}
                row["ms"] = median_ms(step, world.device, repeats=shapes.repeats)
                report.add(row | {"peak GiB": peak_gib(), "difference": worst})


if __name__ == "__main__":
    main()
