"""Times layers in a row, their tokens over the ranks: what attention loses of a step beside its own work.

    torchrun --nproc-per-node 2 -m benchmarks.layers --out FILE
    torchrun --nproc-per-node 2 -m benchmarks.layers --device cpu --hidden 64 --ffn 64 --heads 4:2 --tokens 32    # tiny

A step is a forward and a backward. Its attention is ours; `ulysses`, an all-to-all around FlashAttention-4; or `share`,
that kernel over all tokens with a rank's share of the heads and without messages, which is the same work, and wrong.
Lost is what a step takes longer than with `share`. Ours and Ulysses are compared with float64 before anything is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.attention.baselines.ulysses import to_heads, to_sequence, whole_attention
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import compared, truth_of
from benchmarks.attention.failures import attempt
from benchmarks.attention.job import Problem
from benchmarks.attention.method import Attention, Method
from benchmarks.bench import Flags, benchmark, dtype_on, flags_of
from benchmarks.documents import Offsets, draw_documents, log_normal
from benchmarks.programs import draw
from benchmarks.same_bits import attention
from dfa_megatron import DistAttentionConfig, masks
from dfa_megatron.doctor.world import World, stopwatch
from dfa_megatron.flags import flag


@dataclass(frozen=True)
class LayersJob(Flags):
    """What is timed."""

    heads: tuple[str, ...] = flag(("32:32", "32:8"), "of queries, and of keys and values", metavar="HEADS:KV_HEADS")
    tokens: tuple[int, ...] = flag((2048, 4096, 8192, 16384), "of a rank", metavar="N")
    seeds: tuple[int, ...] = flag((0,), "of packs, beside one sequence", metavar="SEED")
    hidden: int = flag(4096, "width")
    ffn: int = flag(11008, "inner width of an MLP")
    layers: int = flag(8, "in a row")
    kernel: str = flag("auto", "of ours")
    schedule: str = flag("auto", "of ours")
    repeats: int = flag(5, "of a step, after two")

    def sequences(self, tokens: int) -> Iterator[Offsets]:
        """Yield the offsets of the documents of each sequence."""
        yield 0, tokens
        yield from (draw_documents(tokens, 1, seed, log_normal(7.0, 1.2)) for seed in self.seeds)


class PlainLayer(nn.Module):
    """A layer of a Llama, without positions."""

    def __init__(self, job: LayersJob, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = job.hidden // heads
        self.widths = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        self.norm, self.mlp_norm = nn.RMSNorm(job.hidden), nn.RMSNorm(job.hidden)
        self.qkv, self.proj = (nn.Linear(job.hidden, n, bias=False) for n in (sum(self.widths), job.hidden))
        self.up, self.down = nn.Linear(job.hidden, 2 * job.ffn, bias=False), nn.Linear(job.ffn, job.hidden, bias=False)

    def forward(self, x: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Return the layer's output."""
        parts = self.qkv(self.norm(x)).split(self.widths, -1)
        x = x + self.proj(attend(*(part.unflatten(-1, (-1, self.head_dim)) for part in parts)).flatten(2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def ways(job: LayersJob, offsets: Offsets, ranks: int) -> dict[str, Attention]:
    """Return the attentions by name."""
    lengths = [hi - lo for lo, hi in pairwise(offsets)] if len(offsets) > 2 else []

    def ulysses(*qkv: torch.Tensor) -> torch.Tensor:
        return to_sequence(whole_attention(*map(to_heads, qkv), lengths).contiguous())

    def share(*qkv: torch.Tensor) -> torch.Tensor:
        whole = (x.reshape(1, -1, x.shape[2] // ranks, x.shape[3]) for x in qkv)
        return whole_attention(*whole, lengths).reshape(qkv[0].shape)

    config = DistAttentionConfig(kernel=job.kernel, schedule=job.schedule)
    return {"ours": attention(offsets, config, None), "ulysses": ulysses, "share": share}


def check(job: LayersJob, problem: Problem, world: World) -> None:
    """Compare ours and Ulysses with float64, of a sequence and a pack; end the run if one is wrong."""
    tokens = world.size * (256 if world.cuda else 32)
    sizes = problem.heads, problem.kv_heads, problem.head_dim
    drawn = draw(tokens, *sizes, seed=1, device=world.device, dtype=getattr(torch, problem.dtype))
    for offsets in ((0, tokens), (0, tokens // 8 + 1, tokens // 2, tokens)):
        exact = truth_of(problem, drawn, masks.documents([hi - lo for lo, hi in pairwise(offsets)]))
        for name, attend in [*ways(job, offsets, world.size).items()][:2]:
            _, state, why = compared(Method(name, "ours", lambda *_, attend=attend: attend), exact, world)  # type: ignore[misc]
            if state:
                raise SystemExit(f"{name} of {problem}, documents {offsets}: {state}, {why}")


def measure(job: LayersJob, layers: nn.ModuleList, offsets: Offsets, world: World) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step in each way, and of the host until it has issued it."""
    shape, dtype = (2, 1, offsets[-1] // world.size, job.hidden), dtype_on(world.device)
    x, dout = torch.randn(*shape, device=world.device, dtype=dtype)

    def step(attend: Attention) -> None:
        layers.zero_grad()
        y = x
        for layer in layers:
            y = layer(y, attend)
        y.backward(dout)

    attentions = ways(job, offsets, world.size)
    timers = {name: Timer(partial(step, attend), job.repeats) for name, attend in attentions.items()}
    first = {name: stopwatch(timer.run, world.device) for name, timer in timers.items()}
    for timer in timers.values():
        timer.run()
    take_turns(world, [*timers.values()])
    ms = {name: timer.median for name, timer in timers.items()}
    lost = {name: 100 * (1 - ms["share"] / ms[name]) for name in ("ours", "ulysses")}
    host = {name: timer.host_median for name, timer in timers.items()}
    return {"lost %": lost, "ms": ms, "host ms": host, "first step's seconds": first}


def main(argv: Sequence[str] | None = None) -> None:
    """Check, time, print and write."""
    job = flags_of(LayersJob, __doc__, argv)
    with benchmark(job) as (world, report):
        dtype = dtype_on(world.device)
        for names in job.heads:
            heads = [int(count) for count in names.split(":")]
            check(job, Problem(*heads, job.hidden // heads[0], "causal", str(dtype).removeprefix("torch.")), world)
            torch.manual_seed(0)
            with world.device:
                layers = nn.ModuleList(PlainLayer(job, *heads) for _ in range(job.layers)).to(dtype)
            for tokens in job.tokens:
                for offsets in job.sequences(world.size * tokens):
                    about: dict[str, Any] = {"heads": names, "tokens": tokens, "documents": len(offsets) - 1}
                    report.add(about | attempt(world, partial(measure, job, layers, offsets, world)))


if __name__ == "__main__":
    main()
