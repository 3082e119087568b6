"""Trains Qwen3-8B, all of it, on one sequence over all GPUs: our attention, an all-to-all, PyTorch's and DeepSpeed's.

    torchrun --nproc-per-node 4 -m benchmarks.whole_model --lengths 131072 262144 --seconds 580 --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.whole_model --device cpu --lengths 64 128 --ways ours ulysses     # tiny

All ways share one model: FSDP2 cuts each layer over the ranks, AdamW steps in float32 in host memory, the loss goes by
tiles. They differ in attention, in its order of tokens, and in checkpointing: ours saves attention's output, the others
recompute whole layers. Rows begin with the same weights and text, so that the first losses and gradients must agree.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.attention.baselines.deepspeed import join_deepspeed, register_ulysses
from benchmarks.attention.baselines.ulysses import to_heads, to_sequence, whole_attention
from benchmarks.attention.failures import attempt
from benchmarks.attention.method import zigzag
from benchmarks.bench import Flags, Report, benchmark, clear_memory, flags_of, wait
from benchmarks.model_shapes import SHAPES, Shape
from dfa_megatron import TrainingConfig, shard_sequence
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.huggingface import distribute_attention, local_attention
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.loss import Head, cross_entropy
from dfa_megatron.runtime.comm.groups import channels

Tensor = torch.Tensor
LENGTHS: list[int] = []
"""Of the documents of a pack, for `whole`; none: a sequence is one document."""


def whole(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attend causally to a whole sequence (batch, heads, seq, dim)."""
    return whole_attention(*(x.transpose(1, 2) for x in (q, k, v)), LENGTHS), None


def exchanged(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Exchange tokens for heads, attend to whole sequences, and exchange them back."""
    parts = (to_heads(x.transpose(1, 2).contiguous()) for x in (q, k, v))
    return to_sequence(whole_attention(*parts, LENGTHS).contiguous()), None


def context_parallel(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Call the attention that PyTorch's context has replaced, with cuDNN's kernel."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


FUNCTIONS = {"ulysses": exchanged, "pytorch": context_parallel, "alst": whole}
"""By the way; transformers gets them under names of which it knows no masks, so that it makes none."""
WAYS = ("ours", *FUNCTIONS)

TINY = Shape(32, 48, 8, 4, 8, family="Qwen3", theta=1e6, layers=2, vocabulary=256)
AGREE = {"loss": 2e-3, "gradient_norm": 2e-2, "attention_norm": 5e-2}
"""The relative differences of a first step from the first way's; another attention changes the last one most."""


@dataclass(frozen=True)
class Whole(Flags):
    """What is run."""

    ways: tuple[str, ...] = flag(WAYS, "to compare", choices=WAYS)
    lengths: tuple[int, ...] = flag((131072, 262144), "of whole sequences")
    steps: int = flag(2, "of each row, after a short one; the fastest counts")
    offload: bool = flag(False, "what checkpoints save to the host")
    mlp_tile: int = flag(0, "of tokens, by which MLPs run, and run again in the backward; 0: whole")
    longest: bool = flag(False, "then a step at the longest length that memory and time let expect, of each way")
    seconds: float = flag(580.0, "after which nothing is begun; what would take longer is left out")


class TiledModel(torch.nn.Module):
    """A causal language model that returns its loss, made by tiles; the mean over the ranks is the batch's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None, share: float) -> Any:
        """Return `share` times the summed loss of this rank's tokens."""
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return share * cross_entropy(hidden, Head(weight=self.model.lm_head.weight), labels, reduction="sum")


class WholeBench:
    """The model that all ways share, made at first and after a failure, its optimizer, and the rows."""

    def __init__(self, job: Whole, world: World, report: Report) -> None:
        self.job, self.world, self.report = job, world, report
        self.all: list[dict[str, Any]] = report.content["rows"]
        self.training: Any = None
        self.optimizer: Any = None

    @property
    def left(self) -> float:
        """Return the seconds in which something may begin."""
        return self.job.seconds - self.report.seconds

    def known(self, **like: Any) -> list[dict[str, Any]]:
        """Return the rows that have figures, and these values."""
        return [row for row in self.all if "failed" not in row and like.items() <= row.items()]

    def build(self) -> None:
        """Make the model on the meta device, cut it, and give it memory on the host."""
        cuda = self.world.cuda
        with torch.device("meta"):
            model = (SHAPES["qwen3-8b"] if cuda else TINY).model(1 << 23).float().train()
        for layer in model.model.layers if self.job.mlp_tile else ():
            layer.mlp.forward = functools.partial(by_tiles, layer.mlp.forward, self.job.mlp_tile)
        self.training = TiledModel(model)
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        given = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if cuda else OffloadPolicy()}
        for part in (model.model.embed_tokens, *model.model.layers, self.training):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if cuda else None, torch.float32), **given)
        self.training.to_empty(device="cpu")
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.world.device)
        self.names, self.parameters = zip(*self.training.named_parameters(), strict=True)

    def pin(self, length: int) -> None:
        """Have the allocator hold the host memory that checkpoints save to: machines give it slowly, once."""
        config = self.training.model.config
        rows = 1, length // self.world.size, config.hidden_size
        _ = [torch.empty(rows, dtype=torch.bfloat16, pin_memory=True) for _ in range(2 * config.num_hidden_layers)]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew: the weights of this rank's dice, and moments of 0."""
        dice = torch.Generator(self.world.device).manual_seed(self.world.rank)
        for parameter in self.parameters:
            noise = torch.ones(parameter.to_local().shape, device=self.world.device)
            parameter.to_local().copy_(noise if parameter.dim() == 1 else noise.normal_(0, 0.02, generator=dice))
        if self.optimizer is not None:
            torch._foreach_zero_([x for state in self.optimizer.state.values() for x in state.values()])

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Clip and step, in float32 and host memory; return the norm of all gradients, and of attention's."""
        if self.optimizer is None:  # FSDP has moved the shards to pinned memory by now
            shards = [parameter.to_local() for parameter in self.parameters]
            self.optimizer = torch.optim.AdamW(shards, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        gradients = [parameter.grad.to_local() for parameter in self.parameters]
        squares = [float(norm) ** 2 for norm in torch._foreach_norm(gradients)]
        some = [x for name, x in zip(self.names, squares, strict=True) if name.split(".")[-2][1:] == "_proj"]
        norm, attention = (total**0.5 for total in self.world.sums([sum(squares), sum(some)]))
        torch._foreach_mul_(gradients, min(1.0, 1 / norm))
        shards = self.optimizer.param_groups[0]["params"]
        for parameter, shard, gradient in zip(self.parameters, shards, gradients, strict=True):
            parameter.grad, shard.grad = None, gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"gradient_norm": norm, "attention_norm": attention}

    def step(self, way: str, length: int) -> dict[str, float]:
        """Take a training step on Python's manual, as `make train` does; return loss, norms and milliseconds."""
        text = torch.frombuffer(bytearray(str(pydoc_data.topics.topics), "utf-8"), dtype=torch.uint8).long()
        ids = text.repeat(-(-length // len(text)))[None, :length].to(self.world.device)
        batch, times = batch_for(way, ids, self.world), [self.now()]
        loss = self.training(**batch, share=self.world.size / (length - 1))
        loss.backward()
        times.append(self.now())
        norms = self.update()
        times.append(self.now())
        value = self.world.sums([loss.item()])[0] / self.world.size
        return {"loss": value, **norms, "ms": 1e3 * (times[2] - times[0]), "optimizer_ms": 1e3 * (times[2] - times[1])}

    def now(self) -> float:
        """Return the time once all ranks are here."""
        wait()
        dist.barrier(group=self.world.side)
        return time.perf_counter()

    def measure(self, way: str, length: int, steps: int) -> dict[str, Any]:
        """Return a row's figures; the short step before makes what is made once."""
        if self.training is None:
            self.build()
        cuda, memory = self.world.cuda, [0.0] * 3
        with attending(way, self.training.model, self.world, offload=self.job.offload):
            self.begin()
            self.step(way, min(self.world.size * (2048 if cuda else 8), length))
            self.begin()
            if cuda and self.job.offload:
                self.pin(length)
            clear_memory()
            taken = [self.step(way, length) for _ in range(steps)]
            if cuda:  # outside of PyTorch's allocator: messages, NCCL, the context
                free, total = torch.cuda.mem_get_info()
                peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                memory = [x / 2**30 for x in (*peaks, total - free - torch.cuda.memory_reserved())]
        best = min(taken, key=lambda step: step["ms"])
        return {
            "ms": best["ms"], "tokens_per_second": 1e3 * length / best["ms"], "optimizer_ms": best["optimizer_ms"],
            **dict(zip(("allocated_gib", "reserved_gib", "outside_gib"), self.world.slowest(memory), strict=True)),
            **{name: taken[0][name] for name in AGREE}, "steps": taken,
        }  # fmt: skip

    def row(self, way: str, length: int, steps: int, **more: Any) -> None:
        """Measure a row if there is time, compare it with the first way's, and write it."""
        row: dict[str, Any] = {"way": way, "length": length, "offload": self.job.offload, **more}
        known = (self.known(way=way) or self.known())[-1:]  # attention grows with the square
        seconds = sum(other["ms"] / 1e3 * max(1, length / other["length"]) ** 2 for other in known)
        if any(other["way"] == way and other.get("failed", "").startswith("out of") for other in self.all):
            row["failed"] = "a shorter sequence ran out of memory"
        elif steps * seconds > self.left:
            row["failed"] = f"no time left: {steps} steps of about {seconds:.0f} s"
        else:
            row |= attempt(self.world, lambda: self.measure(way, length, steps))
        if row.get("failed", "").startswith(("out of", "failed")):
            self.training = self.optimizer = self.parameters = None  # FSDP is in the middle of a step
            gc.collect()
        others = self.known(length=length)
        if "failed" not in row and others:
            row["differs"] = {name: abs(row[name] / others[0][name] - 1) for name in AGREE}
            if any(not row["differs"][name] <= most for name, most in AGREE.items()):
                row["failed"] = f"wrong: not what {others[0]['way']} computes"
        self.report.add(row)

    def longest(self, way: str) -> None:
        """Take a step at the longest sequence that memory and the time left let expect, from two lengths or more."""
        rows = self.known(way=way)
        ends, used = [row["length"] for row in rows], [row["allocated_gib"] + row["outside_gib"] for row in rows]
        if len({*ends}) < 2:
            return
        slope, base = statistics.linear_regression(ends, used)
        total = torch.cuda.mem_get_info()[1] / 2**30 if self.world.cuda else 0.0
        by_memory = (0.94 * total - base) / slope if slope > 0 else 2.0 * max(ends)  # some of it stays free
        by_time = ends[-1] * (max(0, 0.8 * self.left) / (rows[-1]["ms"] / 1e3)) ** 0.5
        unit = self.world.size * (4096 if self.world.cuda else 16)
        length = int(min(by_memory, by_time)) // unit * unit
        self.row(way, length, 1, by_memory=int(by_memory), by_time=int(by_time), expected_gib=base + slope * length)


def by_tiles(own: Callable[[Tensor], Tensor], tile: int, x: Tensor) -> Tensor:
    """Compute an MLP (batch, seq, dim) by tiles of tokens; each keeps its input alone for the backward."""
    return torch.cat([checkpoint(own, part, use_reentrant=False) for part in x.split(tile, 1)], 1)


@contextlib.contextmanager
def attending(way: str, inner: Any, world: World, *, offload: bool) -> Iterator[None]:
    """Give a transformers model that attention inside, and its checkpointing; refuse what does not run here.

    offload: what checkpoints save goes to pinned host memory, of every way by the same copies beside the computation.
    """
    if way == "ours":
        distribute_attention(inner, config=TrainingConfig(checkpoint="remat", remat_offload=offload))
        yield
        dist.barrier()
        for over in channels():  # messages lie past PyTorch's allocator
            over.close()
        return
    if way == "pytorch" and not world.cuda:
        raise UnsupportedError("context_parallel on a CPU", "it splits PyTorch's CUDA attentions only", "GPUs")
    ALL_ATTENTION_FUNCTIONS[way] = FUNCTIONS[way]  # DeepSpeed wraps it
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_attention(inner))
        set_checkpointing(inner, "full", offload=offload)
        inner.set_attn_implementation(way)
        try:
            if way == "alst":
                join_deepspeed(world)
                register_ulysses(inner, "alst", world.size)
            if world.cuda and way != "pytorch":
                __import__("flash_attn.cute")
        except ImportError as error:
            raise UnsupportedError(way, str(error), "installing that package") from error
        if way == "pytorch":
            from torch.distributed.tensor.experimental import context_parallel as context

            unused = [torch.zeros(1, 2 * world.size, device=world.device)]  # it wants something to split
            stack.enter_context(context(init_device_mesh("cuda", (world.size,)), buffers=unused, buffer_seq_dims=[1]))
        yield


def batch_for(way: str, ids: Tensor, world: World) -> dict[str, Tensor | None]:
    """Return what a rank passes: its next tokens as labels, and its tokens, but for ours, which takes all of them."""
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    if way == "ours":
        return {"ids": ids, "labels": shard_sequence(labels), "positions": None}
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    cut = (lambda x: zigzag(x, world)) if way == "pytorch" else shard_sequence  # PyTorch's own balance
    return {name: cut(x).contiguous() for name, x in (("ids", ids), ("labels", labels), ("positions", places))}


def main() -> None:
    """Run, and write the rows with the machine and the arguments."""
    job = flags_of(Whole, __doc__)
    about = {"allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
    with benchmark(job, 600.0, **about, rows=[]) as (world, report):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size) if world.cuda else 1)  # torchrun gives one
        report.content["threads"] = torch.get_num_threads()
        bench = WholeBench(job, world, report)
        ways = [way for way in WAYS if way in job.ways]
        for length in sorted(job.lengths):
            for way in ways:
                bench.row(way, length, job.steps)
        for way in ways if job.longest else ():
            bench.longest(way)
    raise SystemExit(any(row.get("failed", "").startswith(("wrong", "failed")) for row in report.content["rows"]))


if __name__ == "__main__":
    main()
