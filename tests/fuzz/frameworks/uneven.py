"""Draw loss masks that leave ranks without a counted token; positions within documents, and pairs of a mask."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from dfa_megatron.masks import Mask

MASKS = ("all", "prompts", "a rank of prompt", "one slice", "holes", "half of the rows", "one token", "padding")
"""Which tokens count in the loss. The last rows end early; "nothing" is drawn beside them."""


def positions(every: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the positions within documents, (rows, tokens), from the offsets of each row."""
    rows = [torch.cat([torch.arange(hi - lo) for lo, hi in pairwise(row)]) for row in every]
    return torch.stack(rows)


def cells(mask: Mask) -> torch.Tensor:
    """Return which query sees which key, (length, length)."""
    difference = torch.arange(mask.length) - torch.arange(mask.length)[:, None]
    seen = torch.zeros(mask.length, mask.length, dtype=torch.bool)
    for q, kv, lo, hi in mask.tiles:
        part = difference[q.lo : q.hi, kv.lo : kv.hi]
        seen[q.lo : q.hi, kv.lo : kv.hi] |= (part >= lo) & (part <= hi)
    return seen


def counted(kind: str, rows: int, tokens: int, parts: int, seed: int) -> torch.Tensor:
    """Return which tokens count, bool (rows, tokens), for a sequence that `parts` ranks share in order."""
    dice, share = random.Random(seed), max(tokens // parts, 1)
    counts = torch.ones(rows, tokens, dtype=torch.bool)
    for row in range(rows):
        if kind == "prompts":
            counts[row, : dice.randint(0, tokens - 1)] = False
        elif kind == "a rank of prompt":
            counts[row, : share + dice.randint(0, share - 1)] = False
        elif kind == "one slice":
            first = share * dice.randint(0, parts - 1)
            counts[row] = False
            counts[row, first : first + share] = True
        elif kind == "holes":
            counts[row] = torch.tensor([dice.random() < 0.3 for _ in range(tokens)])
        elif kind == "half of the rows":
            counts[row] = row % 2 == 0
            counts[row, : dice.randint(0, share)] = False
        elif kind == "one token":
            counts[row] = False
        elif kind == "padding":
            counts[row, tokens - dice.randint(0, tokens - 1) :] = False
    if not counts.any() and kind != "nothing":
        counts[dice.randrange(rows), dice.randrange(tokens - 1)] = True
    return counts if kind != "nothing" else torch.zeros_like(counts)
