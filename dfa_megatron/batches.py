"""Plan the micro-batches of a step: which ranks compute which samples together.

Attention takes the square of a sample's length, all else its length: packs of equally many tokens are not equally long.
So micro-batches are filled from the longest sample that waits, as long as ranks last that are full of its like; and the
last few so that all ranks end at once. Groups are aligned blocks of ranks: few process groups serve all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import ceil, inf
from operator import index

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware, computing_with
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD
from dfa_megatron.plan.language.sizes import Sizes

LINEAR = 5.4e14
"""Operations per second of all but attention: a Llama-3-8B layer of 32K tokens a rank on four H200
(benchmarks/results/2026-11-22-4xh200-megatron-layers.json)."""
SLACK = 1.05
"""A pack may take so much longer than the longest sample of its micro-batch."""

LAST, TRIES = 4, 30
"""Of how many micro-batches all shall last equally long, and how often SLACK is added until they hold all samples."""

_SIZES, _HARDWARE = Sizes(kv_heads=8, backward_needs="delta"), computing_with("flash4", H200_NVLINK)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer of a model on a machine, by which packs are timed.

    sizes: of its attention. parameters: those that a token passes, of a Llama-3-8B layer by default.
    """

    sizes: Sizes = _SIZES
    parameters: float = 218.1e6
    hardware: Hardware = _HARDWARE

    def share(self, length: int, ranks: int) -> float:
        """Return the seconds that a sample adds to a pack, forward and backward, on ranks that share it evenly.

        Messages of the balanced schedule run beside its kernels: each rank gets the keys of half of the others.
        """
        rows, pairs, machine = ceil(length / ranks), length * (length + 1) / 2 / ranks, self.hardware
        nodes = machine.node_size(ranks)
        link = machine.link if nodes is None or machine.network is None else machine.network
        seconds = rows * 6 * self.parameters / LINEAR
        for phase, names in ((FORWARD, ("kv",)), (BACKWARD, ("kv", "dkv"))):
            rate = machine.rate(phase.name, pairs, rows, rows, self.sizes.heads * self.sizes.batch)
            sent = ranks // 2 * rows * sum(sum(self.sizes.row_bytes(name)) for name in names)
            seconds += max(pairs * self.sizes.flops_per_pair(phase) / rate, sent / link.bytes_per_second)
        return seconds


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Ranks that share a pack in one micro-batch.

    samples: their numbers, in the order of `lengths`. seconds: those of one layer, as planned.
    """

    ranks: range
    samples: tuple[int, ...]
    seconds: float


MicroBatch = tuple[PlannedGroup, ...]
"""Groups of all ranks, in order."""


def plan_batches(
    lengths: Sequence[int], ranks: int, tokens: int, sizes: Sequence[int], *, layer: LayerCost | None = None
) -> list[MicroBatch]:
    """Plan the micro-batches of a step. Equal arguments give an equal plan on every rank.

    Each sample is in one pack of one micro-batch. Every rank is in one group of each micro-batch: `len(group.ranks)` is
    Megatron's `local_cp_size`, or the size of the process group that is given to our functions. A group of n ranks
    begins at a multiple of n. It has none of the samples where they are too few.

    Args:
        lengths: tokens of each sample.
        ranks: those that share the step, data and context parallel.
        tokens: the most that a rank may hold in a micro-batch: a group of n ranks holds up to n times as many.
        sizes: of groups, ascending, each a divisor of the next, and the last of `ranks`.
        layer: by which packs are timed; None is one of Llama-3-8B on H200s.

    Raises:
        UnsupportedError: a sample fits into no group, or the sizes do not nest.
    """
    sizes, lengths = [index(size) for size in sizes], [index(length) for length in lengths]
    _check(lengths, ranks, tokens, sizes)
    packer = _Packer(lengths, ranks, tokens, sizes, LayerCost() if layer is None else layer)
    waiting, found = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)), list[MicroBatch]()
    while waiting:
        for opened in packer.last(waiting) or [packer.full(waiting)]:
            found.append(packer.groups(opened))
            waiting = opened.left
    return found


def _check(lengths: list[int], ranks: int, tokens: int, sizes: list[int]) -> None:
    chain = [*sizes, ranks]
    if not sizes or sizes[0] < 1 or any(more % less or more == less < ranks for less, more in pairwise(chain)):
        raise UnsupportedError(
            f"groups of sizes {sizes} on {ranks} ranks", "they do not nest", "sizes such as 1, 2, 4, 8, up to the ranks"
        )
    most = sizes[-1] * tokens
    for sample, length in enumerate(lengths):
        if not 0 < length <= most:
            raise UnsupportedError(
                f"sample {sample} of {length} tokens",
                f"a group of {sizes[-1]} ranks holds 1 to {most}, {tokens} a rank",
                "a larger group or more tokens a rank; samples that are cut, or left out",
            )


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """A group whose samples are being chosen, with their tokens and seconds."""

    ranks: range
    samples: list[int] = field(default_factory=list)
    tokens: int = 0
    load: float = 0.0


@dataclass(slots=True)
class _OpenBatch:
    """A micro-batch that is being filled: ranks without a pack, packs, and samples that are left."""

    free: set[int]
    packs: list[_OpenGroup] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


class _Packer:
    """Fill micro-batches, each from the longest sample that waits."""

    def __init__(self, lengths: list[int], ranks: int, tokens: int, sizes: list[int], layer: LayerCost) -> None:
        self.lengths, self.ranks, self.tokens, self.sizes, self.layer = lengths, ranks, tokens, sizes, layer
        self._share = cache(layer.share)

    def least(self, sample: int) -> int:
        """Return the fewest ranks that hold a sample."""
        return next(size for size in self.sizes if self.lengths[sample] <= size * self.tokens)

    def full(self, waiting: list[int]) -> _OpenBatch:
        """Fill a micro-batch that lasts as long as ranks that are full of samples such as the longest."""
        longest, size = self.lengths[waiting[0]], self.least(waiting[0])
        return self._micro_batch(waiting, self._share(longest, size) * size * self.tokens / longest * SLACK)

    def last(self, waiting: list[int]) -> list[_OpenBatch]:
        """Return micro-batches that end the step with all ranks at once, if they are few; none: samples were left."""
        count = ceil(sum(self.lengths[sample] for sample in waiting) / (self.ranks * self.tokens))
        tried = [self._even(waiting, count, smallest) for smallest in self.sizes] if count <= LAST else []
        return min(tried, key=lambda timed: timed[0], default=(inf, []))[1]

    def _even(self, waiting: list[int], count: int, smallest: int) -> tuple[float, list[_OpenBatch]]:
        """Return so many micro-batches of groups from this size on, that last about equally long, or none; timed."""
        sizes = [(sample, max(smallest, self.least(sample))) for sample in waiting]
        bound = sum(self._share(self.lengths[n], size) * size for n, size in sizes) / (self.ranks * count)
        for _ in range(TRIES):
            bound *= SLACK
            found, left = list[_OpenBatch](), waiting
            while left and len(found) < count:
                found.append(self._micro_batch(left, bound, smallest))
                left = found[-1].left
            if not left:
                return sum(max(pack.load for pack in each.packs) for each in found), found
        return inf, []

    def _micro_batch(self, waiting: list[int], bound: float, smallest: int = 1) -> _OpenBatch:
        """Fill one micro-batch up to so many seconds, by larger groups where ranks would have no sample."""
        opened = _OpenBatch({*range(self.ranks)})
        opened.left = [sample for sample in waiting if not self._place(opened, sample, bound, smallest)]
        if opened.free and smallest < self.sizes[-1]:
            return self._micro_batch(waiting, bound, next(size for size in self.sizes if size > smallest))
        return opened

    def _place(self, opened: _OpenBatch, sample: int, bound: float, smallest: int) -> bool:
        """Put a sample on the fewest ranks that do it within the bound, where the load is least; or leave it."""
        length = self.lengths[sample]
        for size in self.sizes:
            share = self._share(length, size)
            if size < smallest or length > size * self.tokens or share > bound:
                continue
            pack = self._take(opened, size)
            if pack is None:
                room = size * self.tokens - length
                fits = [pack for pack in opened.packs if len(pack.ranks) == size and pack.tokens <= room]
                pack = min(fits, key=lambda pack: pack.load, default=None)
            if pack is not None and pack.load + share <= bound:
                pack.samples.append(sample)
                pack.tokens += length
                pack.load += share
                return True
        return False

    def _take(self, opened: _OpenBatch, size: int) -> _OpenGroup | None:
        """Open a group on the first block of free ranks of that size; None: there is none."""
        blocks = (range(first, first + size) for first in range(0, self.ranks if opened.free else 0, size))
        block = next((block for block in blocks if opened.free.issuperset(block)), None)
        if block is None:
            return None
        opened.free.difference_update(block)
        opened.packs.append(pack := _OpenGroup(block))
        return pack

    def groups(self, opened: _OpenBatch) -> MicroBatch:
        """Return the groups of a micro-batch in the order of their ranks."""
        idle = [_OpenGroup(range(first, first + self.sizes[0])) for first in opened.free if first % self.sizes[0] == 0]
        packs = sorted(opened.packs + idle, key=lambda pack: pack.ranks[0])
        return tuple(PlannedGroup(pack.ranks, tuple(pack.samples), pack.load) for pack in packs)
