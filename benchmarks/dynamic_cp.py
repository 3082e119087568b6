"""Compares a fixed context-parallel size with one per micro-batch, by the planner's simulation. It needs no GPU.

    python -m benchmarks.dynamic_cp --out FILE      # --quick: 4 ranks, one step

Each step is a batch of documents, which all methods pack for the same ranks under the same tokens a rank:

- `ring 4`: groups of 4, packs in order, each document zigzag over the group in a ring: Megatron's `dp_balanced`.
- `dynamic`: Megatron's `default_dynamic_cp`. Groups of 1, 2, 4, ... ranks, the same ring inside.
- `ours 4`: the packs of `ring 4`; `dynamic, ours`: those of `dynamic`. Contiguous rows, schedule `auto`.
- `ours all`: one group of all ranks, contiguous rows, schedule `auto`.

`by length` sorts the documents of a step before they are packed, as `dynamic` does.

A layer costs a rank its attention, by tiles of 128 tokens, and seconds per token for all else. Those come from a
Llama-3-8B layer on four H200, measured at two lengths. With `meet`, that many neighbours wait for each other in every
layer, as experts do.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.dynamic_cp_packs import MicroBatch, all_ranks, dynamic, fixed
from dfa_megatron.plan.cost.candidate import best
from dfa_megatron.plan.cost.choose import candidates
from dfa_megatron.plan.cost.hardware import H200_NIC_400G, H200_SLOW_LINK, TILE, Hardware, computing_with
from dfa_megatron.plan.cost.outline import Outline, estimate
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD
from dfa_megatron.plan.language.mask import causal, documents
from dfa_megatron.plan.language.shape import AttentionShape

RESULTS = Path(__file__).parent / "results"
MACHINES = {"nvlink": computing_with("flash4", H200_NIC_400G), "slow link": computing_with("flash4", H200_SLOW_LINK)}
"""NVLink in nodes of 8 with 400 Gb/s a GPU between them; and every link at 26 GB/s."""


@dataclass(frozen=True)
class Work:
    """A distribution of lengths and a layer. documents: of a step, per rank. budget: tokens of a rank per micro-batch.

    parameters: of a layer that a token passes. meet: ranks that wait for each other in every layer.
    """

    mean: float
    sigma: float
    least: int
    most: int
    documents: int
    budget: int
    shape: AttentionShape
    parameters: float
    meet: int


LLAMA = AttentionShape(heads=32, kv_heads=8, backward_needs="delta")
LLAMA_PARAMETERS = 218.1e6
WORKS = {
    "megatron": Work(1024, 1.5, 128, 8192, 2, 2048, LLAMA, LLAMA_PARAMETERS, 1),
    "verl": Work(
        4096, 1.0, 1024, 16384, 16, 4096, AttentionShape(heads=32, kv_heads=4, backward_needs="delta"), 56.9e6, 8
    ),
}
"""Megatron's example of dynamic context parallelism, with a Llama-3-8B layer. And verl#6555, a Qwen3-30B-A3B layer:
its tail is not published, so it is log-normal too."""


def draw(work: Work, ranks: int, seed: int) -> list[int]:
    """Return the lengths of a step: log-normal, cut at both ends."""
    random_lengths = random.Random(seed)
    middle = log(work.mean) - work.sigma**2 / 2
    drawn = (exp(random_lengths.gauss(middle, work.sigma)) for _ in range(work.documents * ranks))
    return [min(max(int(length), work.least), work.most) for length in drawn]


Cost = tuple[float, float, int]
"""Seconds of the device and of the host for attention, and tokens of each rank."""


def tiles(tokens: int) -> int:
    """Return the tiles of a kernel that hold so many tokens."""
    return -(-tokens // TILE)


def causal_tiles(tokens: int) -> int:
    """Return the tiles of a causal block; half of those on the diagonal is lost."""
    return tiles(tokens) * (tiles(tokens) + 1) // 2


@lru_cache(maxsize=4096)
def ring(lengths: tuple[int, ...], size: int, shape: AttentionShape, hardware: Hardware) -> Cost:
    """Return the cost of a zigzag ring of every document, padded to two chunks a rank."""
    padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    local, chunks = sum(padded) // size, [length // (2 * size) for length in padded]
    pairs = [sum(causal_tiles(2 * chunk) for chunk in chunks), sum(tiles(chunk) * tiles(2 * chunk) for chunk in chunks)]
    work = tuple(tuple((rank, TILE**2 * pairs[step > 0], local) for rank in range(size)) for step in range(size))
    device = host = 0.0
    for phase in (FORWARD, BACKWARD):
        back = phase is BACKWARD
        parts = ((("kv", local),), (("kv", local), ("dkv", local)), (("dkv", local),))
        kinds = [
            (0 if not (back and step) else 1) if step < size - 1 else 2 if back and size > 1 else None
            for step in range(size)
        ]
        sent = tuple(
            () if kind is None else tuple((rank, (rank + 1) % size, kind) for rank in range(size)) for kind in kinds
        )
        found = estimate(Outline(phase, size, sum(padded), work, sent, parts), shape, hardware)
        device, host = device + found.seconds, host + found.host_seconds
    return device, host, local


@lru_cache(maxsize=4096)
def ours(lengths: tuple[int, ...], size: int, shape: AttentionShape, hardware: Hardware) -> Cost:
    """Return the cost of our packs in contiguous rows, padded to two chunks a rank."""
    fill = -sum(lengths) % (2 * size)
    mask = documents((*lengths[:-1], lengths[-1] + fill))
    taken = best(candidates(mask, size, layout="contiguous", shape=shape, hardware=hardware))
    assert taken is not None
    rounded = TILE**2 * sum(causal_tiles(length) for length in lengths) / mask.area
    return taken.device * rounded, taken.host, mask.length // size


def methods(work: Work, ranks: int, lengths: list[int]) -> dict[str, tuple[list[MicroBatch], Callable[..., Cost]]]:
    """Return packs and attention of every method."""
    sized = dynamic(lengths, ranks, work.budget)
    found: dict[str, tuple[list[MicroBatch], Callable[..., Cost]]] = {
        "dynamic": (sized, ring),
        "dynamic, ours": (sized, ours),
    }
    for order, taken in (("", lengths), (", by length", sorted(lengths, reverse=True))):
        fours = fixed(taken, ranks, work.budget, 4)
        found[f"ring 4{order}"], found[f"ours 4{order}"] = (fours, ring), (fours, ours)
        found[f"ours all{order}"] = all_ranks(taken, ranks, work.budget), ours
    return found


def step_seconds(batches: list[MicroBatch], cost: Callable[..., Cost], work: Work, hardware: Hardware) -> float:
    """Return the seconds of one layer over a step, until the last rank is done."""
    ranks, each = sum(group.size for group in batches[0]), seconds_per_token() * work.parameters / LLAMA_PARAMETERS
    clock = [0.0] * ranks
    for groups in batches:
        rank = 0
        for group in groups:
            device, host, tokens = cost(tuple(group.lengths), group.size, work.shape, hardware)
            members = range(rank, rank := rank + group.size)
            end = max(clock[member] for member in members) + max(device + tokens * each, host)
            for member in members:
                clock[member] = end
        for lo in range(0, ranks, work.meet):
            clock[lo : lo + work.meet] = [max(clock[lo : lo + work.meet])] * len(clock[lo : lo + work.meet])
    return max(clock)


@lru_cache(maxsize=1)
def measured_layer() -> tuple[float, float]:
    """Return seconds per token of all but attention, and of attention for 128K tokens, of a layer on four ranks."""
    rows = json.loads((RESULTS / "2026-11-22-4xh200-megatron-layers.json").read_text())["layers"]
    whole, half = (
        next(row["ms_per_layer"] for row in rows if (row["mode"], row["length"], row["groups"]) == ("none", length, 8))
        for length in (131072, 65536)
    )
    linear = 4 * half - whole  # of 32K tokens a rank: attention is quadratic, the rest linear
    return linear / 1e3 / 32768, (whole - linear) / 1e3


def seconds_per_token() -> float:
    """Return the measured seconds of all but attention."""
    return measured_layer()[0]


def checks() -> list[dict[str, Any]]:
    """Return simulated beside measured milliseconds of attention, forward and backward."""
    hardware, found = MACHINES["nvlink"], []
    taken = best(candidates(causal(131072), 4, layout="contiguous", shape=LLAMA, hardware=hardware))
    assert taken is not None
    layer = {"what": "attention of a layer of 128K tokens", "simulated ms": taken.device * 1e3}
    found.append({**layer, "measured ms": measured_layer()[1] * 1e3})
    shape = AttentionShape(heads=64, kv_heads=8, backward_needs="delta")
    for row in json.loads((RESULTS / "2026-11-23-1xh200-pack-programs.json").read_text())["rows"]:
        lengths = tuple(hi - lo for lo, hi in pairwise(row["cu_seqlens"]))
        device, _, _ = ours(lengths, row["ranks"], shape, hardware)
        what = f"a pack of {row['documents']} documents over {row['ranks']} ranks"
        found.append({"what": what, "simulated ms": device * 1e3, "measured ms": row["slowest ms"]})
    return found


def compare(name: str, ranks: int, machine: str, steps: int) -> dict[str, Any]:
    """Return tokens per second and rank of a layer, in thousands, of every method."""
    work, hardware = WORKS[name], MACHINES[machine]
    seconds: dict[str, list[float]] = {}
    tokens, sizes = [], {}
    for seed in range(steps):
        lengths = draw(work, ranks, seed)
        tokens.append(sum(lengths))
        for method, (batches, cost) in methods(work, ranks, lengths).items():
            seconds.setdefault(method, []).append(step_seconds(batches, cost, work, hardware))
            if method == "dynamic":
                for group in (group for groups in batches for group in groups):
                    sizes[group.size] = sizes.get(group.size, 0) + group.size * group.tokens
    rate = {method: fmean(tokens) / fmean(took) / ranks / 1e3 for method, took in seconds.items()}
    shares = {str(size): round(held / sum(sizes.values()), 3) for size, held in sorted(sizes.items())}
    return {"work": name, "ranks": ranks, "machine": machine, "steps": steps, "rate": rate, "dynamic sizes": shares}


def main() -> None:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 ranks, one step, NVLink")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = [(4, "nvlink")] if options.quick else [(n, m) for m in MACHINES for n in (4, 8, 16, 32, 64)]
    rows = []
    for name in WORKS:
        for ranks, machine in wanted:
            rows.append(compare(name, ranks, machine, 1 if options.quick else options.steps))
            print(rows[-1], flush=True)
    result = {"works": {name: asdict(work) for name, work in WORKS.items()}, "checks": checks(), "rows": rows}
    print(json.dumps(result["checks"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
