"""Time the host's part of a forward and a backward: until the calls have returned, before the device is waited for.

    python -m benchmarks.host_time --out host_time.json
    torchrun --nproc-per-node 2 -m benchmarks.host_time        # the calls of real ranks, which may share a GPU
    python -m benchmarks.host_time --device cpu --rows 32 --heads 4 --kv-heads 2 --kernel cpu

Cases, each with its program replayed (`bound`) and run as it stands (`unbound`), in alternating runs:

    program P         one rank's program of P ranks, with a transport that moves nothing
    function          the public function over all ranks of this run, one or more; with verify off, too
    empty function    an autograd function with the same tensors that computes and sends nothing: PyTorch's own part
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.attention.ablation import as_it_stands
from benchmarks.attention.clock import once
from benchmarks.bench import Call, Flags, benchmark, flags_of, share_gpus
from benchmarks.programs import Tensors, both_phases, draw, passes, prepare
from dfa_megatron import DistAttentionConfig, dist_flash_attn_func
from dfa_megatron.doctor.world import World
from dfa_megatron.flags import flag


@dataclass(frozen=True)
class Shapes(Flags):
    """What is timed."""

    dtype: str = flag("bfloat16", "of the tensors")
    kernel: str = flag("auto", "as in the options")
    rows: int = flag(512, "of each rank")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    ranks: tuple[int, ...] = flag((1, 2, 4, 8), "of the programs that are timed alone")
    rounds: int = flag(5, "alternating runs")
    calls: int = flag(50, "of a run")


def main(argv: Sequence[str] | None = None) -> None:
    """Time every case both ways and print milliseconds."""
    shapes = flags_of(Shapes, __doc__, argv)
    if shapes.device != "cpu" and torch.cuda.is_available():
        share_gpus(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # which `join` makes the current one
    with benchmark(shapes) as (world, report):
        sizes = shapes.rows, shapes.heads, shapes.kv_heads, shapes.head_dim
        given = draw(*sizes, dtype=getattr(torch, shapes.dtype), device=world.device)
        for name, call in cases(shapes, world, given).items():
            timed: dict[str, list[float]] = {"bound": [], "unbound": []}
            for _ in range(shapes.rounds):
                timed["bound"].append(host_ms(call, shapes.calls, world))
                with as_it_stands():
                    timed["unbound"].append(host_ms(call, shapes.calls, world))
            row = {way: statistics.median(ms) for way, ms in timed.items()}
            report.add({"case": name, "world": world.size, **row})


def cases(shapes: Shapes, world: World, given: Tensors) -> dict[str, Call]:
    """Return the calls by name; programs of other numbers of ranks are the last rank's."""
    alone = {
        f"program {ranks}": both_phases(prepare(given, ranks, ranks - 1, shapes.kernel), given)
        for ranks in (shapes.ranks if world.size == 1 else ())
    }
    named = {"function": "on", "function, calls not compared": "off"}
    for name, verify in named.items():
        config = DistAttentionConfig(kernel=shapes.kernel, verify=verify)
        alone[name] = passes(partial(dist_flash_attn_func, causal=True, config=config), given[:3], given[3])[1]
    return alone | {
        "empty function": passes(Empty.apply, given[:3], given[3])[1],
    }


class Empty(torch.autograd.Function):
    """Takes q, k and v and returns q; its gradients are dout and what it saved."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute nothing."""
        ctx.save_for_backward(k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute nothing."""
        return dout, *ctx.saved_tensors


def host_ms(call: Call, calls: int, world: World) -> float:
    """Return the median milliseconds until a call has returned, each from an idle device."""
    return statistics.median([once(world, call)[1] for _ in range(calls + 5)][5:])


if __name__ == "__main__":
    main()
