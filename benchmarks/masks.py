"""Masks by name, each of so many tokens, and FlexAttention with a tree; `benchmarks.packed --masks` times them.

A tree is a prompt and its answers: `tree 8 0.6` has 8 rollouts whose prompt is 0.6 of their tokens, on average. Other
masks draw documents, log-normal. FlexAttention is torch's, compiled, on one GPU.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch

from benchmarks.attention.method import Attention
from benchmarks.documents import draw_documents, log_normal
from dfa_megatron import masks
from dfa_megatron.masks import Mask


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


def flex(name: str, tokens: int, device: torch.device) -> Attention:
    """Return FlexAttention with a tree: j <= i, and i is in the subtree of j's segment."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _, rollouts, share = name.split()
    lengths, parents = tree_of(tokens, int(rollouts), float(share))
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
