"""Draw packs of documents, log-normal or as long as a histogram says.

A histogram is a JSON object of shares by range of tokens, {"[0,32)": 0.03, ...}: the files of LongCA-bench's
`distribution` folder, or of your own data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

Offsets = tuple[int, ...]
Lengths = Callable[[random.Random], float]
"""Draws the tokens of a document."""


def log_normal(mean: float, sigma: float) -> Lengths:
    """Return lengths whose logarithms have this mean and deviation."""
    return lambda draw: draw.lognormvariate(mean, sigma)


def histogram(path: Path) -> Lengths:
    """Return lengths of a file: a range by its share, then a length evenly within it.

    Raises:
        ValueError: a key is no range "[lo,hi)".
    """
    shares = {name: float(share) for name, share in json.loads(path.read_text(encoding="utf-8")).items()}
    if wrong := [name for name in shares if name[:1] + name[-1:] != "[)" or name.count(",") != 1]:
        raise ValueError(f"{path}: {wrong[0]!r} is no range of tokens such as '[0,32)'")
    ranges = [tuple(map(int, name[1:-1].split(","))) for name in shares]

    def length(draw: random.Random) -> float:
        (lo, hi) = draw.choices(ranges, list(shares.values()))[0]
        return draw.randrange(lo, hi)

    return length


def draw_documents(tokens: int, multiple: int, seed: int, length: Lengths) -> Offsets:
    """Draw the offsets of a pack: lengths are multiples of `multiple`, none above a quarter of the pack."""
    draw, lengths = random.Random(seed), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        drawn = int(length(draw)) // multiple * multiple
        lengths.append(min(max(multiple, drawn), max(multiple, tokens // 4), left))
    return tuple(accumulate(lengths, initial=0))
