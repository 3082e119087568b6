"""Times attention over packed documents beside ring-flash-attn's varlen functions, after checking each against float64.

    torchrun --nproc-per-node 4 -m benchmarks.packed --heads 64 --kv-heads 8 --tokens-per-rank 8192 --out packed.json

Documents are drawn log-normal, or as --lengths says, to a quarter of the pack, and rounded to multiples of 2P tokens:
ring-flash-attn's ring and zigzag cut each document into P or 2P chunks. A method that is wrong on a small pack is
not timed (ring-flash-attn's ring and zigzag are in float32: they sum into what they read). Times are of the slowest
rank, the median over repetitions in which methods take turns, each from an idle GPU; `in a row` is of one of 8 calls
without a wait between them, as a model's layers make them. TFLOP/s per rank count the pairs of the documents:
4 * pairs * heads * head_dim forward, 2.5 times that backward. `new pack` is what the first call with documents that
were not seen before takes longer on the host: planning, and agreeing on it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from benchmarks import packs
from benchmarks.attention.baselines import version_of
from benchmarks.attention.clock import once
from benchmarks.bench import flags_of
from benchmarks.packs import Attend, Method, Pack, compare_and_time, passes
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func, shard_sequence
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import flag
from dfa_megatron.runtime.prepare import in_use


@dataclass(frozen=True)
class Shapes(packs.Shapes):
    """What is timed, and how."""

    schedule: tuple[str, ...] = flag(("auto", "load_balanced"), "of ours, or a layout of tokens")
    kernel: tuple[str, ...] = flag(("auto",), "of ours")
    transport: tuple[str, ...] = flag(("auto",), "of ours")
    new_packs: bool = flag(True, "time them too")


def our_method(schedule: str, kernel: str, transport: str, causal: bool) -> Method:
    """Return one way to run ours."""
    layout = schedule if schedule in ("zigzag", "load_balanced") else "contiguous"
    config = DistAttentionConfig(
        schedule=schedule if layout == "contiguous" else "auto", kernel=kernel, transport=transport
    )

    def start(pack: Pack) -> Attend:
        return lambda q, k, v: dist_flash_attn_varlen_func(
            q, k, v, pack.offsets, causal=causal, layout=layout, config=config
        )  # type: ignore[return-value]

    def places(pack: Pack) -> torch.Tensor:
        return shard_sequence(torch.arange(pack.tokens), layout=layout, dim=0, cu_seqlens=pack.offsets)

    return Method(f"dfa {schedule} {kernel} {transport}", start, places, took=lambda: in_use()[-1].plan.schedule)


def peer_methods(world: World, kv_heads: int, causal: bool) -> list[Method]:
    """Return ring-flash-attn's three varlen functions, or nothing where it or flash-attn is not installed."""
    try:
        version_of("ring-flash-attn"), version_of("flash-attn")
    except UnsupportedError:
        return []
    from benchmarks.attention.baselines import ring_flash_attn

    def llama3(pack: Pack) -> Attend:
        return ring_flash_attn.llama3_varlen(pack.offsets, kv_heads, causal, world)

    def cut(function: str) -> Callable[[Pack], Attend]:
        def start(pack: Pack) -> Attend:
            local = [offset // world.size for offset in pack.offsets]
            cu_seqlens = torch.tensor(local, dtype=torch.int32, device=world.device)
            longest = max(hi - lo for lo, hi in pairwise(local))
            attend = getattr(ring_flash_attn._package(), function)
            return lambda q, k, v: attend(q, k, v, cu_seqlens, longest, causal=causal)

        return start

    def in_order(pack: Pack) -> torch.Tensor:
        return torch.arange(pack.tokens).chunk(world.size)[world.rank]

    def of_each(chunks: tuple[int, ...], count: int) -> Callable[[Pack], torch.Tensor]:
        def places(pack: Pack) -> torch.Tensor:
            parts = (torch.arange(lo, hi).chunk(count) for lo, hi in pairwise(pack.offsets))
            return torch.cat([part[chunk] for part in parts for chunk in chunks])

        return places

    zigzag = of_each((world.rank, 2 * world.size - 1 - world.rank), 2 * world.size)
    methods = [
        Method("ring-flash-attn llama3 varlen", llama3, in_order),
        Method("ring-flash-attn ring varlen", cut("ring_flash_attn_varlen_func"), of_each((world.rank,), world.size)),
    ]
    if causal:
        methods.append(Method("ring-flash-attn zigzag varlen", cut("zigzag_ring_flash_attn_varlen_func"), zigzag))
    return methods


def new_packs(method: Method, shapes: Shapes, world: World) -> float:
    """Return the host's milliseconds for new documents: the median of some packs."""
    tokens, taken = world.size * shapes.tokens_per_rank, []
    for seed in range(100, 105):
        both = passes(method, shapes, Pack(shapes.documents(world.size, seed), tokens), world)[1]
        taken.append(once(world, both)[1])
    return world.slowest([statistics.median(taken)])[0]


def main(argv: list[str] | None = None) -> None:
    """Check, time, print and write."""
    shapes = flags_of(Shapes, __doc__, argv)
    world = join(shapes.device)
    combinations = itertools.product(shapes.schedule, shapes.kernel, shapes.transport)
    methods = [our_method(*one, shapes.causal) for one in combinations]
    methods += peer_methods(world, shapes.kv_heads, shapes.causal)
    short = replace(shapes, tokens_per_rank=shapes.check_tokens, mean=3.0, sigma=1.0, lengths=None)
    sizes = ((one.documents(world.size, one.seed), world.size * one.tokens_per_rank) for one in (short, shapes))
    small, pack = (Pack(*size) for size in sizes)
    report, timed = compare_and_time(methods, shapes, small, pack, world)
    for method, row in timed if shapes.new_packs else ():
        if method.name.startswith("dfa"):
            row["new pack ms"] = new_packs(method, shapes, world) - row["host_ms"]
            report.show({"method": method.name, "new pack ms": row["new pack ms"]})
    report.write()
    world.leave()


if __name__ == "__main__":
    main()
