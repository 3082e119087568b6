"""Trains a model on English text twice, step by step in turns: over all GPUs with our attention, and on one without it.

    torchrun --nproc-per-node 2 -m benchmarks.long_run --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.long_run --model hybrid --steps 200 --out FILE

Weights, packs and rates are the same. Each row is a step of both; FILE.svg shows the curves. The Llama has 0.5 billion
parameters. The hybrid has Qwen3-Next's gated delta nets and attention, without experts, whose choice is not continuous.
Its sequences are one document each, because without ours states pass from one document to the next.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.bench import Flags, Report, benchmark, flags_of
from benchmarks.whole_model import LENGTHS, whole
from dfa_megatron import TrainingConfig
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag
from dfa_megatron.huggingface import distribute_attention

FIGURES = ("loss", "gradient_norm", "ms")


@dataclass(frozen=True)
class LongRun(Flags):
    """What is trained."""

    model: str = flag("llama", "", choices=("llama", "hybrid"))
    steps: int = flag(500, "of training")
    tokens: int = flag(16384, "of a step")
    seconds: float = flag(580.0, "after which no step is begun")


def build(job: LongRun, *, tiny: bool) -> Any:
    """Return the model on the current device."""
    hidden, layers = (32, 4) if tiny else (1024, 24 if job.model == "llama" else 8)
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 5 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": hidden // 128 or 2, "num_key_value_heads": hidden // 256 or 1, "vocab_size": 256}
    sizes |= {"head_dim": min(hidden, 128), "max_position_embeddings": job.tokens, "use_cache": False}
    torch.manual_seed(0)
    if job.model == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
    delta = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "mlp_only_layers": [*range(layers)]}
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**sizes, **delta)).train()


def pack(step: int, job: LongRun) -> dict[str, torch.Tensor]:
    """Return a step's documents, pages of Python's manual in an order of its own; the last one is cut."""
    pages = [page.encode() for page in pydoc_data.topics.topics.values()]
    random.Random(step).shuffle(pages)
    ids = torch.frombuffer(bytearray(b"".join(pages)[: job.tokens]), dtype=torch.uint8).long()
    LENGTHS[:] = [] if job.model == "llama" else [len(ids)]
    while (left := len(ids) - sum(LENGTHS)) > 0:
        LENGTHS.append(min(left, len(pages[len(LENGTHS)])))
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    labels = ids.masked_fill(places == 0, -100)
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": places[None]}


def picture(file: Path) -> None:
    """Draw the curves of a JSON file beside it, as SVG without the date."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    pyplot.rcParams |= {"svg.hashsalt": "dfa_megatron", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    figure, axes = pyplot.subplots(2, sharex=True, figsize=(8, 5), layout="constrained")
    for axis, what in zip(axes, ("loss", "gradient_norm"), strict=True):
        for run, style in (("alone", "-"), ("ours", "--")):
            axis.plot([row["step"] for row in rows], [row[run][what] for row in rows], style, lw=1, label=run)
        axis.set(ylabel=what.replace("_", " "))
    axes[0].legend(labels=["one rank, without ours", "ours, over the ranks"])
    figure.supxlabel("step")
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def main() -> None:
    """Train, write each step, and show how far the two runs are apart."""
    job = flags_of(LongRun, __doc__)
    with benchmark(job, 600.0, rows=[]) as (world, report):
        train(job, world, report)
        if job.out and world.rank == 0:
            picture(job.out)


class Run:
    """One of the two: the model, cut over its ranks, and its optimizer."""

    def __init__(self, job: LongRun, world: World, group: Any, *, ours: bool) -> None:
        with world.device:
            self.model = model = build(job, tiny=not world.cuda)
        if ours:
            distribute_attention(model, group=group, config=TrainingConfig(checkpoint="remat"))
        else:
            ALL_ATTENTION_FUNCTIONS["packed"] = whole  # transformers makes no mask for what it does not know
            model.set_attn_implementation("packed")
        policy = MixedPrecisionPolicy(torch.bfloat16 if world.cuda else None, torch.float32)
        given: Any = {"mesh": DeviceMesh.from_group(group, world.device.type), "mp_policy": policy}
        for part in (*model.model.layers, model):
            fully_shard(part, **given)
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def take(self, step: int, batch: dict[str, torch.Tensor]) -> list[float]:
        """Take a step; return the values of `FIGURES`."""
        start = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        self.optimizer.param_groups[0]["lr"] = 3e-4 * min(1.0, (step + 1) / 20)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item(), norm.item(), 1e3 * (time.perf_counter() - start)]


def train(job: LongRun, world: World, report: Report) -> None:
    """Train both in turns, step by step: ours on every rank, the other on rank 0 while the rest wait."""
    groups = {"ours": dist.new_group([*range(world.size)]), "alone": dist.new_group([0])}
    mine = [*groups][: 1 + (world.rank == 0)]
    runs = {name: Run(job, world, groups[name], ours=name == "ours") for name in mine}
    for step in range(job.steps):
        if report.seconds > job.seconds:
            break
        batch = {name: x.to(world.device) for name, x in pack(step, job).items()}
        taken = {name: dict(zip(FIGURES, run.take(step, batch), strict=True)) for name, run in runs.items()}
        report.add({"step": step, **taken})
    if world.rank == 0:
        rows = report.content["rows"]
        far = {x: [abs(row["ours"][x] / row["alone"][x] - 1) for row in rows] for x in FIGURES[:2]}
        told = {what: {"largest": max(each), "last": each[-1]} for what, each in far.items()}
        report.add({"seconds": report.content["seconds"], **told}, "apart")


if __name__ == "__main__":
    main()
