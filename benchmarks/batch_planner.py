"""Compares `plan_batches` with Megatron's schedulers and with fixed groups, by simulation. It needs no GPU.

    python -m benchmarks.batch_planner --out FILE      # --quick: 4 ranks, one step

Each step is a draw of documents, which all methods pack for the same ranks under the same tokens a rank:

- `ring 4`: groups of 4, packs in order, each document zigzag over the group in a ring: Megatron's `dp_balanced`.
- `dynamic`: Megatron's `default_dynamic_cp`. Groups of 1, 2, 4, ... ranks, the same ring inside.
- `planned`: `plan_batches`, contiguous rows, schedule `auto`; `planned ring`: its packs in Megatron's ring.
- `ours 4`, `ours all`: fixed groups, contiguous rows, schedule `auto`. `by length`: documents sorted before packing.

A layer costs a rank its attention, by tiles of 128 tokens, and seconds per token for all else, measured on four H200.
With `meet`, that many neighbours wait for each other in every micro-batch, as experts do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.bench import Report, flags_of
from dfa_megatron.batches import LINEAR, LayerCost, plan_batches
from dfa_megatron.flags import flag
from dfa_megatron.plan.cost.choose import CallOutline, Contents, Outline, best, candidates, clocked
from dfa_megatron.plan.cost.hardware import H200_NIC_400G, H200_SLOW_LINK, Hardware, computing_with
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD
from dfa_megatron.plan.language.mask import documents
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.language.work import TILE

MACHINES = {"nvlink": computing_with("flash4", H200_NIC_400G), "slow link": computing_with("flash4", H200_SLOW_LINK)}
"""NVLink in nodes of 8 with 400 Gb/s a GPU between them; and every link at 26 GB/s."""


@dataclass(frozen=True)
class Work:
    """A distribution of lengths and a layer. documents: of a step, per rank. budget: tokens of a rank per micro-batch.

    parameters: of a layer that a token passes. meet: ranks that wait for each other in every micro-batch.
    """

    mean: float
    sigma: float
    least: int
    most: int
    documents: int
    budget: int
    sizes: Sizes
    parameters: float
    meet: int

    def draw(self, ranks: int, seed: int) -> list[int]:
        """Return the lengths of a step: log-normal, cut at both ends."""
        numbers = random.Random(seed)
        middle = log(self.mean) - self.sigma**2 / 2
        drawn = (exp(numbers.gauss(middle, self.sigma)) for _ in range(self.documents * ranks))
        return [min(max(int(length), self.least), self.most) for length in drawn]


WORKS = {
    "megatron": Work(1024, 1.5, 128, 8192, 2, 2048, Sizes(kv_heads=8, backward_needs="delta"), 218.1e6, 1),
    "verl": Work(4096, 1.0, 1024, 16384, 16, 4096, Sizes(kv_heads=4, backward_needs="delta"), 56.9e6, 8),
}
"""Megatron's example of dynamic context parallelism, with a Llama-3-8B layer. And verl#6555, a Qwen3-30B-A3B layer:
its tail is not published, so it is log-normal too."""


@dataclass
class Pack:
    """Neighbouring ranks and the lengths of their documents."""

    size: int
    lengths: list[int] = field(default_factory=list)

    @property
    def load(self) -> float:
        """Return a rank's work as Megatron's scheduler counts it: squares of lengths."""
        return sum(length * length for length in self.lengths) / self.size


MicroBatch = Sequence[Pack]
"""Groups of all ranks, in order."""
Cost = Callable[[tuple[int, ...], int, Sizes, Hardware], tuple[float, float, int]]
"""Seconds of the device and of the host for attention, and tokens of each rank."""


def in_order(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return packs of at most `most` tokens in the given order."""
    packs: list[list[int]] = [[]]
    for length in lengths:
        if packs[-1] and sum(packs[-1]) + length > most:
            packs.append([])
        packs[-1].append(length)
    return packs


def fixed(lengths: Sequence[int], ranks: int, budget: int, size: int) -> list[MicroBatch]:
    """Return Megatron's `dp_balanced`: packs in order, and documents split off until replicas have equally many."""
    packs, replicas = in_order(lengths, size * budget), ranks // size
    while len(packs) % replicas:
        packs.append([max(packs, key=len).pop()])
    groups = [Pack(size, pack) for pack in packs]
    return [groups[lo : lo + replicas] for lo in range(0, len(groups), replicas)]


def dynamic(lengths: Sequence[int], ranks: int, budget: int) -> list[MicroBatch]:
    """Return what Megatron's `default_dynamic_cp` makes of a batch (its `dev` branch of August 2026)."""
    waiting, found = sorted(lengths, reverse=True), list[MicroBatch]()
    while waiting:
        groups, waiting = _micro_batch(waiting, ranks, budget)
        found.append(groups)
    return found


def _micro_batch(lengths: list[int], ranks: int, budget: int) -> tuple[list[Pack], list[int]]:
    """Return one micro-batch and the documents left over, longest first; a rank's work may exceed its bound by 5 %."""
    first, *others = lengths
    groups, left, bound = [Pack(_needed(first, budget), [first])], [], first * budget * 1.05
    for length in others:
        place = _place(groups, length, ranks, budget, bound)
        if place is None:
            left.append(length)
            continue
        groups += [] if place.lengths else [place]
        place.lengths.append(length)
    while (free := ranks - sum(group.size for group in groups)) > 0:
        least = min(group.size for group in groups)
        if least > free:
            (whole, *rest) = in_order(lengths, ranks * budget)
            return [Pack(ranks, whole)], [length for pack in rest for length in pack]
        next(group for group in groups if group.size == least).size *= 2
    return groups, left


def _place(groups: list[Pack], length: int, ranks: int, budget: int, bound: float) -> Pack | None:
    """Return the group, possibly a new empty one, with the least load of the busiest rank; None: it must wait."""
    busiest, free = max(group.load for group in groups), ranks - sum(group.size for group in groups)
    found, least, size = None, bound, _needed(length, budget)
    while size <= ranks:
        fits = [g for g in groups if g.size == size and sum(g.lengths) + length <= size * budget]
        for group in [*fits, *([Pack(size)] if free >= size else [])]:
            load = max(busiest, group.load + length * length / size)
            if load < least or (found is None and load <= least):
                found, least = group, load
        size *= 2
    return found


def _needed(length: int, budget: int) -> int:
    return 1 << max(0, ceil(log(length / budget, 2)))


def causal_tiles(tokens: int) -> int:
    """Return the tiles of a causal block; half of those on the diagonal is lost."""
    tiles = -(-tokens // TILE)
    return tiles * (tiles + 1) // 2


@lru_cache(maxsize=1 << 16)
def ring(lengths: tuple[int, ...], size: int, sizes: Sizes, hardware: Hardware) -> tuple[float, float, int]:
    """Return the cost of a zigzag ring of every document, padded to two chunks a rank."""
    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    local, chunks = sum(padded) // size, [length // (2 * size) for length in padded]
    own = sum(causal_tiles(2 * chunk) for chunk in chunks)
    others = sum(-(-chunk // TILE) * -(-2 * chunk // TILE) for chunk in chunks)
    pairs = [TILE**2 * (others if step else own) for step in range(size)]
    work = [[CallOutline(rank, of_step, local, local) for rank in range(size)] for of_step in pairs]
    device = host = 0.0
    for phase in (FORWARD, BACKWARD):
        back = phase is BACKWARD
        sent = list[list[tuple[int, int, Contents]]]()
        for step in range(size):
            names = ["kv"] * (step < size - 1) + ["dkv"] * (back and step > 0)
            parts = tuple((name, local) for name in names)
            sent.append([(rank, (rank + 1) % size, parts) for rank in range(size) if parts])
        found = clocked(Outline(phase, size, work, sent), sizes, hardware)
        device, host = device + found.makespan, host + found.host
    return device, host, local


@lru_cache(maxsize=1 << 16)
def ours(lengths: tuple[int, ...], size: int, sizes: Sizes, hardware: Hardware) -> tuple[float, float, int]:
    """Return the cost of our packs in contiguous rows, of which a rank may hold none."""
    fill = max(0, size - sum(lengths))
    mask = documents((*lengths[:-1], lengths[-1] + fill))
    taken = best(candidates(mask, size, layout="contiguous", sizes=sizes, hardware=hardware))
    assert taken is not None
    assert taken.cost is not None
    rounded = TILE**2 * sum(causal_tiles(length) for length in lengths) / mask.area
    return taken.cost.makespan * rounded, taken.cost.host, -(-mask.length // size)


def methods(work: Work, ranks: int, lengths: list[int], hardware: Hardware) -> dict[str, tuple[list[MicroBatch], Cost]]:
    """Return packs and attention of every method."""
    layer = LayerCost(work.sizes, work.parameters, hardware)
    groups = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= ranks]
    planned: list[MicroBatch] = [
        [Pack(len(group.ranks), [lengths[sample] for sample in group.samples]) for group in batch]
        for batch in plan_batches(lengths, ranks, work.budget, groups, layer=layer)
    ]
    by_length = sorted(lengths, reverse=True)
    fours = fixed(by_length, ranks, work.budget, 4)
    return {
        "planned": (planned, ours),
        "planned ring": (planned, ring),
        "dynamic": (dynamic(lengths, ranks, work.budget), ring),
        "ring 4": (fixed(lengths, ranks, work.budget, 4), ring),
        "ring 4, by length": (fours, ring),
        "ours 4, by length": (fours, ours),
        "ours all, by length": (fixed(by_length, ranks, work.budget, ranks), ours),
    }


def step_seconds(batches: list[MicroBatch], cost: Cost, work: Work, hardware: Hardware) -> float:
    """Return the seconds of one layer over a step, until the last rank is done."""
    ranks, each = sum(group.size for group in batches[0]), 6 * work.parameters / LINEAR
    clock = [0.0] * ranks
    for groups in batches:
        rank = 0
        for group in groups:
            members = range(rank, rank := rank + group.size)
            if group.lengths:
                device, host, tokens = cost(tuple(group.lengths), group.size, work.sizes, hardware)
                end = max(clock[member] for member in members) + max(device + tokens * each, host)
                for member in members:
                    clock[member] = end
        for lo in range(0, ranks, work.meet):
            clock[lo : lo + work.meet] = [max(clock[lo : lo + work.meet])] * len(clock[lo : lo + work.meet])
    return max(clock)


def compare(name: str, ranks: int, machine: str, steps: int) -> dict[str, Any]:
    """Return tokens per second and rank of a layer, in thousands, of every method."""
    work, hardware = WORKS[name], MACHINES[machine]
    seconds: dict[str, list[float]] = {}
    draws = [work.draw(ranks, seed) for seed in range(steps)]
    for lengths in draws:
        for method, (batches, cost) in methods(work, ranks, lengths, hardware).items():
            seconds.setdefault(method, []).append(step_seconds(batches, cost, work, hardware))
    tokens = fmean(map(sum, draws))
    rate = {method: tokens / fmean(took) / ranks / 1e3 for method, took in seconds.items()}
    return {"work": name, "ranks": ranks, "machine": machine, "steps": steps, "rate": rate}


@dataclass(frozen=True)
class Steps:
    """What is simulated."""

    quick: bool = flag(False, "4 ranks, one step, NVLink")
    steps: int = flag(4, "of each work")
    out: Path | None = flag(None, "a JSON file of the figures")


def main() -> None:
    """Compare and write."""
    job = flags_of(Steps, __doc__)
    report = Report(job.out, job, works={name: asdict(work) for name, work in WORKS.items()})
    wanted = [(4, "nvlink")] if job.quick else [(4, "nvlink"), (16, "nvlink"), (64, "nvlink"), (16, "slow link")]
    for name in WORKS:
        for ranks, machine in wanted:
            row = compare(name, ranks, machine, 1 if job.quick else job.steps)
            report.add(row, said=f"{name} {ranks} {machine} {rounded(row['rate'])}")


def rounded(rate: dict[str, float]) -> dict[str, float]:
    """Return rates over that of Megatron's fixed groups."""
    return {method: round(of / rate["ring 4"], 2) for method, of in rate.items()}


if __name__ == "__main__":
    main()
