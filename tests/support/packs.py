"""Random packs of documents, and kernels that may refuse them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import Need
from dfa_megatron.plan.language.layout import Layout, by_name, of_lengths


def random_offsets(tokens: int, draw: random.Random, most: int = 256) -> tuple[int, ...]:
    """From one document to one token each, in at most so many; most often a few short ones and a long one."""
    kind = draw.choice(["one", "single tokens", "short", "mixed", "mixed", "mixed"])
    if kind == "one" or tokens == 1:
        return 0, tokens
    if kind == "single tokens" and tokens <= most:
        return tuple(range(tokens + 1))
    longest = 3 if kind == "short" and tokens <= most else tokens
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(draw.randint(1, min(longest, left)))
    draw.shuffle(lengths)
    return tuple(accumulate(lengths, initial=0))


def skip_unless_it_serves_this_gpu(kernel: str) -> None:
    """Skip the test if a kernel refuses bfloat16 with 8 heads of 128 on 2, in full and causal blocks."""
    capability = torch.cuda.get_device_capability()
    need = Need("cuda", torch.bfloat16, 8, 2, 128, 128, frozenset({"full", "causal"}), capability=capability)
    if why := kernels.get(kernel).refusal(need):
        pytest.skip(f"{kernel}: {why}")


def served(kernel: str, call: Callable[[], None]) -> bool:
    """Whether a call was served: cudnn refuses, by name, plans that cut blocks off the diagonal; no other may."""
    try:
        call()
    except UnsupportedError as error:
        if kernel != "cudnn" or "it has no sliding window" not in str(error):
            raise
        return False
    return True


def drawn_layout(draw: random.Random, ranks: int, length: int) -> Layout:
    """Some layout of so many tokens: by a name, by lengths with zeros among them, or chunks of any owner."""
    kind = draw.choice(["contiguous", "zigzag", "lengths", "chunks"])
    if kind in ("contiguous", "zigzag"):
        return by_name(kind, length, ranks)
    edges = sorted(draw.choices(range(length + 1), k=ranks - 1 if kind == "lengths" else 2 * ranks))
    lengths = [b - a for a, b in zip([0, *edges], [*edges, length], strict=True)]
    if kind == "lengths":
        return of_lengths(lengths)
    whole = of_lengths(lengths)
    return Layout(whole.chunks, tuple(draw.randrange(ranks) for _ in whole.chunks), ranks)
