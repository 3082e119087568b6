"""What comparing every call costs: attentions with verify on and off, in turn, on all ranks of a machine.

    torchrun --nproc-per-node 2 -m benchmarks.verify_cost --out verify.json
    torchrun --nproc-per-node 2 -m benchmarks.verify_cost --device cpu --tokens 64 --heads 4 --kv-heads 2 \\
        --head-dim 16 --layers 2 --rounds 2 --transport auto

Host time is that of issuing a forward and a backward of 16 layers, for each layer, from an idle device; `ms` is until
the device has done them. `before` is verify off while no watchdog runs in the process. Results with and without are
compared to the bit first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from benchmarks.surroundings import machine
from dfa_megatron import DistAttentionConfig
from dfa_megatron.doctor.world import World, join
from dfa_megatron.flags import add_flags, flag, from_flags


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    device: str = flag("auto", "where", choices=("auto", "cuda", "cpu"))
    tokens: int = flag(8192, "of all ranks")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    layers: int = flag(16, "in a row")
    rounds: int = flag(25, "turns of each way")
    transport: tuple[str, ...] = flag(("p2p", "copy_engine"), "as in the options")
    out: Path | None = flag(None, "write the rows as JSON, after each")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one row for each transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Shapes)
    shapes = from_flags(Shapes, parser.parse_args(argv))
    world = join(shapes.device)
    dtype = torch.bfloat16 if world.cuda else torch.float32
    q, k, v = (
        torch.randn(1, shapes.tokens // world.size, heads, shapes.head_dim, device=world.device, dtype=dtype)
        for heads in (shapes.heads, shapes.kv_heads, shapes.kv_heads)
    )
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    torch.use_deterministic_algorithms(True)

    def attend(transport: str, verify: str) -> tuple[torch.Tensor, ...]:
        """Run a chain of layers, and one backward through all of them."""
        out, config = q, DistAttentionConfig(transport=transport, verify=verify)
        for _ in range(shapes.layers):
            found = dfa_megatron.dist_flash_attn_func(out, k, v, causal=True, config=config)
            assert isinstance(found, torch.Tensor)
            out = found
        return (out, *torch.autograd.grad(out.sum(), inputs))

    unwatched = {transport: before(attend, transport, shapes, world) for transport in shapes.transport}
    rows: list[dict[str, Any]] = []
    for transport in shapes.transport:
        compared = [attend(transport, "on") for _ in range(4)][-1]
        for one, other in zip(compared, attend(transport, "off"), strict=True):
            assert torch.equal(one, other), "comparing calls changes no bit"
        taken: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        for turn in range(2 * shapes.rounds):
            verify = ("on", "off")[turn % 2]
            taken[verify].append(once(attend, transport, verify, world))
        on, off = ([statistics.median(times) for times in zip(*taken[verify], strict=True)] for verify in ("on", "off"))
        row = {"transport": transport, "ranks": world.size, "host_ms_before": unwatched[transport][0]}
        row |= {"host_ms_on": on[0], "host_ms_off": off[0], "more_ms": on[0] - off[0]}
        row |= {"ms_before": unwatched[transport][1], "ms_on": on[1], "ms_off": off[1]}
        rows.append({key: x / shapes.layers if "ms" in key else x for key, x in row.items()})
        if world.rank == 0:
            print(json.dumps(rows[-1]), flush=True)
            if shapes.out:
                header = {"machine": machine(), "arguments": {name: str(x) for name, x in vars(shapes).items()}}
                shapes.out.write_text(json.dumps(header | {"rows": rows}, indent=1) + "\n")
    world.leave()


Attend = Callable[[str, str], tuple[torch.Tensor, ...]]


def before(attend: Attend, transport: str, shapes: Shapes, world: World) -> list[float]:
    """Return the medians of `once` without a watchdog, after some turns that make what is made once."""
    times = [once(attend, transport, "off", world) for _ in range(4 + shapes.rounds)][4:]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def once(attend: Attend, transport: str, verify: str, world: World) -> tuple[float, float]:
    """Return the milliseconds until all layers are issued, and until they are done; all ranks start together."""
    wait: Callable[[], object] = torch.cuda.synchronize if world.cuda else lambda: None
    wait()
    dist.barrier(world.side)
    start = time.perf_counter()
    attend(transport, verify)
    issued = time.perf_counter()
    wait()
    return 1e3 * (issued - start), 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
