"""Time learned-sparse attention: the indexer's choice, attention over what it chose, its loss, messages alone.

    python -m benchmarks.indexed --out indexed.json
    torchrun --nproc-per-node 4 -m benchmarks.indexed --out indexed.json
    python -m benchmarks.indexed --device cpu --tokens 256 --index-heads 4 --heads 4 --topk 32 --latent 24 --values 16

Sizes are DeepSeek-V3.2's. Tokens are of the whole sequence, one causal document; every query keeps its own choice. Each
way is checked before it is timed: rows of the choice against scores in float64, attention against the chosen keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bench import Call, Flags, benchmark, clear_memory, dtype_on, flags_of, median_ms, peak_gib, relative
from dfa_megatron import unshard_sequence
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag
from dfa_megatron.indexed import index_loss, index_topk, sparse_attn
from dfa_megatron.indexed.whole import Whole
from dfa_megatron.runtime.comm.compared import telling

ROWS = 16
"""Rows of a rank that are compared with float64."""


@dataclass(frozen=True)
class Shapes(Flags):
    """What is timed."""

    tokens: tuple[int, ...] = flag((32768, 131072), "of the sequence")
    index_heads: int = flag(64, "of the indexer's queries")
    index_dim: int = flag(128, "of its heads")
    topk: int = flag(2048, "keys of a query")
    heads: int = flag(128, "of attention's queries")
    latent: int = flag(576, "of a query and of the one key")
    values: int = flag(512, "of the key's numbers, which are its value")
    rounds: int = flag(3, "repetitions")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one row for each length."""
    shapes = flags_of(Shapes, __doc__, argv)
    with benchmark(shapes) as (world, report):
        for tokens in shapes.tokens:
            report.add({"tokens": tokens} | measure(shapes, tokens, world))


def measure(shapes: Shapes, tokens: int, world: World) -> dict[str, float]:
    """Return milliseconds of each part, the slowest rank's, and the peak of memory."""

    def draw(*shape: int) -> torch.Tensor:
        where: Any = {"device": world.device, "dtype": dtype_on(world.device), "requires_grad": True}
        return torch.randn(1, tokens // world.size, *shape, **where)

    index = draw(shapes.index_heads, shapes.index_dim), draw(shapes.index_dim), draw(shapes.index_heads)
    q, latents = draw(shapes.heads, shapes.latent), draw(1, shapes.latent)
    scale = shapes.latent**-0.5
    chosen = index_topk(*index, shapes.topk)
    assert isinstance(chosen, torch.Tensor)

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        found = sparse_attn(q, latents, None, chosen, head_dim_v=shapes.values, softmax_scale=scale, return_lse=True)
        assert isinstance(found, tuple)
        return found

    out, lse = attend()
    check(shapes, world, index, (q, latents, chosen, out.detach()))
    dout = torch.randn_like(out)

    def both() -> object:
        return torch.autograd.grad(attend()[0], (q, latents), dout)

    def loss() -> object:
        return torch.autograd.grad(index_loss(*index, q, latents, lse, chosen, softmax_scale=scale), index)

    def send(x: torch.Tensor) -> Call:
        with telling(None) as over:
            moves = Whole.of(q, over, "contiguous").keys(world.device)
            return lambda: moves.run(x.detach().flatten(0, 1), over=over)

    del out
    calls = {
        "indexer": lambda: index_topk(*index, shapes.topk),
        "attention": torch.no_grad()(attend),
        "attention and backward": both,
        "loss and backward": loss,
        "messages of index keys": send(index[1]),
        "messages of latents": send(latents),
    }
    return timed(calls, shapes.rounds, world)


def timed(calls: dict[str, Call], rounds: int, world: World) -> dict[str, float]:
    """Return each call's milliseconds, NaN where one GPU has too little memory, and on GPUs its peak of memory."""
    found = dict[str, float]()
    for name, call in calls.items():
        clear_memory()
        try:
            found[f"{name} ms"] = median_ms(call, world.device, warmup=1, repeats=rounds)
        except torch.OutOfMemoryError:
            if world.size > 1:
                raise  # the other ranks wait
            found[f"{name} ms"] = math.nan
        if world.cuda:
            found[f"{name} gib"] = peak_gib()
    return found


def check(shapes: Shapes, world: World, index: tuple[torch.Tensor, ...], attended: tuple[torch.Tensor, ...]) -> None:
    """Compare the last rows of this rank with float64: scores of what is chosen and left out, and attention."""
    index_q, index_k, weights = (x.detach()[0] for x in index)
    q, latents, chosen, out = (x.detach()[0] for x in attended)
    keys, near = (unshard_sequence(x[None].contiguous(), dim=1)[0].double() for x in (index_k, latents))
    first = len(q) * world.rank
    for row in range(len(q) - ROWS, len(q)):
        scores = (weights[row].double() @ (index_q[row].double() @ keys[: first + row + 1].T).relu()).float()
        own = chosen[row][chosen[row] >= 0].long()
        best = scores.topk(len(own)).values
        worst = (scores[own].sort(descending=True).values - best).abs().max() / scores.abs().max()
        assert worst < 1e-2, f"row {row} of rank {world.rank} chose keys {worst:.2g} below the best"
        p = (q[row].double() @ near[own, 0].T * shapes.latent**-0.5).softmax(-1)
        error = relative(out[row], p @ near[own, 0, : shapes.values])
        assert error < 2e-2, f"row {row} of rank {world.rank}: attention is off by {error:.2g}"


if __name__ == "__main__":
    main()
