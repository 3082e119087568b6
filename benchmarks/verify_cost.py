"""What comparing every call costs: attentions with verify on and off, in turn, on all ranks of a machine.

    torchrun --nproc-per-node 2 -m benchmarks.verify_cost --out verify.json
    torchrun --nproc-per-node 2 -m benchmarks.verify_cost --device cpu --tokens 64 --heads 4 --kv-heads 2 \\
        --head-dim 16 --layers 2 --rounds 2 --transport auto

Host time is that of issuing a forward and a backward of 16 layers, for each layer, from an idle device; `ms` is until
the device has done them. `before` is verify off while no watch runs in the process. Results with and without are
compared to the bit first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import dfa_megatron
from benchmarks.attention.clock import Timer, take_turns
from benchmarks.bench import Report, flags_of
from benchmarks.programs import draw
from dfa_megatron import DistAttentionConfig
from dfa_megatron.doctor.world import join
from dfa_megatron.flags import flag


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
    shapes = flags_of(Shapes, __doc__, argv)
    world = join(shapes.device)
    where = {"device": world.device, "dtype": torch.bfloat16 if world.cuda else torch.float32}
    q, k, v, _ = draw(shapes.tokens // world.size, shapes.heads, shapes.kv_heads, shapes.head_dim, **where)
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

    def timers(transport: str, *verify: str) -> list[Timer]:
        made = [Timer(functools.partial(attend, transport, way), shapes.rounds) for way in verify]
        take_turns(world, made)
        return made

    for transport in shapes.transport:  # what is made once
        for _ in range(4):
            attend(transport, "off")
    before = {transport: timers(transport, "off")[0] for transport in shapes.transport}
    report = Report(shapes.out, shapes)
    for transport in shapes.transport:
        compared = [attend(transport, "on") for _ in range(4)][-1]
        for one, other in zip(compared, attend(transport, "off"), strict=True):
            assert torch.equal(one, other), "comparing calls changes no bit"
        on, off = timers(transport, "on", "off")
        named = {"before": before[transport], "on": on, "off": off}
        times = {f"host_ms_{way}": timer.host_median for way, timer in named.items()}
        times |= {f"ms_{way}": timer.median for way, timer in named.items()}
        times["more_ms"] = times["host_ms_on"] - times["host_ms_off"]
        of_layer = {name: ms / shapes.layers for name, ms in times.items()}
        report.add({"transport": transport, "ranks": world.size} | of_layer)
    world.leave()


if __name__ == "__main__":
    main()
