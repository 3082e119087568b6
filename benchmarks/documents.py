"""Draw packs of documents, log-normal or as long as a histogram says.

A histogram is a JSON object of shares by range of tokens, {"[0,32)": 0.03, ...}: the files of LongCA-bench's
`distribution` folder, or of your own data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from benchmarks.bench import Flags
from dfa_megatron.flags import flag

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


@dataclass(frozen=True)
class PackShapes(Flags):
    """Flags of every benchmark of packs."""

    heads: int = flag(64, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    tokens_per_rank: int = flag(8192, "of the pack")
    mean: float = flag(7.0, "of the logarithm of a document's tokens")
    sigma: float = flag(1.2, "of the same")
    lengths: Path | None = flag(None, "a histogram of lengths in place of these two, see benchmarks/documents.py")
    seed: int = flag(0, "of the documents")
    repetitions: int = flag(20, "calls of a time")

    def documents(self, ranks: int, seed: int) -> Offsets:
        """Return the documents of a pack, multiples of 2P tokens."""
        lengths = log_normal(self.mean, self.sigma) if self.lengths is None else histogram(self.lengths)
        return draw_documents(ranks * self.tokens_per_rank, 2 * ranks, seed, lengths)
