"""Times masks and prompt trees, after each is checked against float64, beside the causal mask and FlexAttention.

    python -m benchmarks.masks --out masks.json                                            # one GPU
    torchrun --nproc-per-node 2 -m benchmarks.masks --tokens 32768 131072 --out masks.json

A tree is a prompt and its answers: `tree 8 0.6` has 8 rollouts whose prompt is 0.6 of their tokens, on average. Other
masks draw documents, log-normal. A mask that is wrong over 8,192 tokens and one kv head is not timed. TFLOP/s of a rank
count the pairs that attend: 4 * pairs * heads * head_dim forward, 2.5 times that backward. Times are medians of the
slowest rank, of one of 8 calls in a row. `flex` is torch's compiled FlexAttention, of trees and on one GPU.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.clock import Timer, take_turns
from benchmarks.attention.correctness import compared, truth_of
from benchmarks.attention.job import FLOPS_OF, Problem
from benchmarks.attention.method import Attention, Method, contiguous
from benchmarks.bench import Report, flags_of, leave, ranks_or_one
from benchmarks.documents import draw_documents, log_normal
from benchmarks.packed import ROW, in_a_row
from benchmarks.programs import Tensors, draw, passes
from dfa_megatron import DistAttentionConfig, dist_flash_attn_func, masks
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag
from dfa_megatron.masks import Mask
from dfa_megatron.runtime.prepare import in_use


def some(tokens: int) -> list[int]:
    """Return lengths of documents that fill so many tokens."""
    offsets = draw_documents(tokens, 2, 7, log_normal(7.0, 1.2) if tokens >= 8192 else log_normal(3.0, 1.0))
    return [hi - lo for lo, hi in pairwise(offsets)]


def tree_of(tokens: int, rollouts: int, share: float) -> tuple[list[int], list[int]]:
    """Return lengths and parents: a prompt, and answers that vary by half to both sides."""
    drawn = random.Random(rollouts)
    mean = tokens / (share / (1 - share) + rollouts)
    answers = [max(1, int(mean * drawn.uniform(0.5, 1.5))) for _ in range(rollouts)]
    answers = [max(1, int(one * mean * rollouts / sum(answers))) for one in answers]
    return [tokens - sum(answers), *answers], [-1, *[0] * rollouts]


CASES: dict[str, Callable[[int], Mask]] = {
    "causal": masks.causal,
    "full": masks.full,
    "causal window": lambda n: masks.sliding_window(n, n // 8),
    "full window": lambda n: masks.sliding_window(n, n // 8, n // 8),
    "causal documents": lambda n: masks.documents(some(n)),
    "full documents": lambda n: masks.documents(some(n), causal=False),
    "prefix LM": lambda n: masks.prefix_lm(n, n // 4),
    "prefix LM documents": lambda n: masks.prefix_lm_documents(some(n), [one // 4 for one in some(n)]),
    "causal blockwise": lambda n: masks.causal_blockwise(some(n)),
    "block causal documents": lambda n: masks.block_causal_documents(some(n), max(2, n // 32)),
    "global window": lambda n: masks.global_sliding(n, n // 16, n // 16),
    "images": lambda n: masks.two_way_blocks([n], [(at, at + n // 128) for at in range(n // 128, n, n // 64)]),
    "blocks": lambda n: masks.block_causal_documents([n], n // 128),
    **{
        f"tree {rollouts} {share}": functools.partial(
            lambda n, rollouts, share: masks.prompt_tree(*tree_of(n, rollouts, share)), rollouts=rollouts, share=share
        )
        for rollouts in (8, 64)
        for share in (0.3, 0.6, 0.9)
    },
}


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    masks: tuple[str, ...] = flag(tuple(CASES), "which", choices=tuple(CASES))
    tokens: tuple[int, ...] = flag((32768,), "of all ranks", metavar="N")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    kernel: str = flag("auto", "of ours")
    schedule: str = flag("auto", "of ours")
    flex: bool = flag(False, "FlexAttention beside the trees")
    repetitions: int = flag(7, "of a time")
    device: str = flag("auto", "where", choices=("auto", "cpu"))
    out: Path | None = flag(None, "where the figures go as JSON")


def ours(shapes: Shapes, mask: Mask) -> Attention:
    """Return our function with a mask."""
    config = DistAttentionConfig(kernel=shapes.kernel, schedule=shapes.schedule)
    return lambda q, k, v: dist_flash_attn_func(q, k, v, mask=mask, config=config)  # type: ignore[return-value]


def flex(tokens: int, tree: tuple[list[int], list[int]], device: torch.device) -> Attention:
    """Return FlexAttention with a tree: j <= i, and i is in the subtree of j's segment."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, parents = tree
    ends = list(accumulate(lengths))
    for at in reversed(range(len(parents))):
        if parents[at] >= 0:
            ends[parents[at]] = max(ends[parents[at]], ends[at])
    until = torch.repeat_interleave(torch.tensor(ends), torch.tensor(lengths)).to(device)
    block = create_block_mask(lambda b, h, i, j: (j <= i) & (i < until[j]), None, None, tokens, tokens, device=device)
    run: Any = torch.compile(flex_attention)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=block, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def inputs(shapes: Shapes, tokens: int, world: World) -> Tensors:
    """Return q, k, v and dout of all tokens, the same on every rank."""
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return draw(tokens, shapes.heads, shapes.kv_heads, shapes.head_dim, 1, device=world.device, dtype=dtype)


def wrong(shapes: Shapes, mask: Mask, world: World) -> str:
    """Return what of out, dq, dk and dv of one kv head is too far from float64, or ""."""
    thin = replace(shapes, heads=shapes.heads // shapes.kv_heads, kv_heads=1)
    problem = Problem(thin.heads, 1, thin.head_dim, "full", "bfloat16" if world.cuda else "float32")
    exact = truth_of(problem, inputs(thin, mask.length, world), mask)
    return compared(Method("ours", "ours", lambda *_: ours(shapes, mask)), exact, world)[2]


def measure(shapes: Shapes, name: str, tokens: int, world: World) -> dict[str, Any]:
    """Return the figures of one mask."""
    mask = CASES[name](tokens)
    few = CASES[name](min(tokens, 8192 - 8192 % world.size))  # long documents have other tiles than short ones
    row: dict[str, Any] = {"mask": name, "tokens": tokens, "tiles": len(mask.tiles)}
    if said := wrong(shapes, few, world):
        return row | {"wrong": said}
    given = [contiguous(x, world).contiguous() for x in inputs(shapes, tokens, world)]
    calls = {"": passes(ours(shapes, mask), given[:3], given[3])[1]}
    calls[""]()
    row |= {"schedule": (last := in_use()[-1]).plan.schedule, "kernel": last.kernel.name}
    if shapes.flex and name.startswith("tree") and world.size == 1:
        _, rollouts, share = name.split()
        calls["flex "] = passes(
            flex(tokens, tree_of(tokens, int(rollouts), float(share)), world.device), given[:3], given[3]
        )[1]
    timers = {one: Timer(functools.partial(in_a_row, call), shapes.repetitions) for one, call in calls.items()}
    for call in calls.values():
        in_a_row(call)
    take_turns(world, list(timers.values()))
    flops = FLOPS_OF["both"] * 4 * mask.area * shapes.heads * shapes.head_dim / world.size / 1e9
    for one, timer in timers.items():
        row |= {f"{one}ms": timer.median / ROW, f"{one}host ms": statistics.median(timer.host) / ROW}
        row[f"{one}TFLOP/s"] = flops * ROW / timer.median
    return row


def main(argv: list[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    world = ranks_or_one(shapes.device)
    report = Report(shapes.out, shapes)
    for tokens in shapes.tokens:
        for name in shapes.masks:
            report.add(measure(shapes, name, tokens, world))
    leave()


if __name__ == "__main__":
    main()
