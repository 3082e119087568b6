"""Measure one distributed call on the ranks of this machine: errors against float64, time, and the rate of the links.

torchrun --nproc-per-node 4 -m dfa_megatron.doctor.distributed_call --seq-length 32768
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.doctor.kernel_trial import Trial, distances, exact, wrong
from dfa_megatron.doctor.link_probe import open_transports, time_exchanges
from dfa_megatron.doctor.start_ranks import start
from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.plan.language.geometry import CAUSAL
from dfa_megatron.runtime.prepare import in_use

MESSAGE = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Bytes of the message whose rate is reported, by kind of device."""
_SHORT = 64
"""Tokens per rank of the call that is compared."""
_SLACK = 3.0
"""Factor on the limits of one kernel call, because partial results are rounded once more between ranks."""


@dataclass(frozen=True)
class CallFlags:
    """The attention that is timed, causal and with batch 1; `out` is where rank 0 writes the result as JSON."""

    seq_length: int = flag(1024, "tokens of all ranks together")
    heads: int = flag(4, "query heads")
    kv_heads: int = flag(4, "key and value heads")
    head_dim: int = flag(128, "of a head")
    dtype: str = flag("float32", "of q, k and v")
    device: str = flag("cpu", "cuda or cpu")
    out: str = flag("", "a file for the result")


def call_on_ranks(flags: CallFlags, ranks: int) -> dict[str, Any]:
    """Start the ranks and return the result of `measure`, or the failure; cut tokens to a multiple of ranks."""
    flags = replace(flags, seq_length=max(1, flags.seq_length // ranks) * ranks)
    with tempfile.TemporaryDirectory() as folder:
        flags = replace(flags, out=str(Path(folder, "call.json")))
        words = [word for name, value in asdict(flags).items() for word in (f"--{name.replace('_', '-')}", str(value))]
        status = start(["-m", __name__, *words], ranks)
        if status or not Path(flags.out).exists():
            return {"ranks": ranks, "failed": f"the ranks ended with status {status}"}
        return dict(json.loads(Path(flags.out).read_text(encoding="utf-8")))


def measure(flags: CallFlags, world: World, repetitions: int = 5) -> dict[str, Any]:
    """Compare a short call, time a long one, and time a message over each transport; collective.

    Returns:
        ranks, kernel, schedule, transport; errors by result and `wrong`, those beyond the limit, both over all ranks;
        seconds of a forward and its backward on the slowest rank; bytes per second each way by transport.
    """
    dtype = getattr(torch, flags.dtype)
    long = Trial(
        q_len=flags.seq_length, kv_len=flags.seq_length, band=CAUSAL, heads=flags.heads, kv_heads=flags.kv_heads,
        head_dim=flags.head_dim, head_dim_v=flags.head_dim, dtype=dtype, device=str(world.device),
    )  # fmt: skip
    found = _errors(replace(long, q_len=_SHORT * world.size, kv_len=_SHORT * world.size), world)
    q, k, v, dout = _share(long.inputs(), world)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(dist_flash_attn_func(*leaves, causal=True), leaves, dout)

    times = []
    for _ in range(2 + repetitions):
        world.slowest([0.0])  # all ranks start together
        times.append(stopwatch(both, world.device))
    prepared = in_use()[-1]
    return {
        "ranks": world.size,
        "kernel": prepared.kernel.name,
        "schedule": prepared.plan.schedule,
        "errors": found,
        "wrong": wrong(found, dtype, _SLACK),
        "seconds": world.slowest([statistics.median(times[2:])])[0],
        "bytes_per_second": _rates(world),
    }


def _errors(short: Trial, world: World) -> dict[str, float]:
    """Return the largest error of each result over the ranks."""
    inputs = short.inputs()
    q, k, v, dout = _share(inputs, world)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dist_flash_attn_func(*leaves, causal=True, return_lse=True)
    got = (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))
    want = [_part(x, dim=2 if x.dim() == 3 else 1, world=world) for x in exact(short, inputs)]
    mine = distances(got, want, dout, short.kv_len)
    return dict(zip(mine, world.slowest(mine.values()), strict=True))


def _share(inputs: tuple[torch.Tensor, ...], world: World) -> list[torch.Tensor]:
    return [_part(x, dim=1, world=world).clone() for x in inputs]


def _part(x: torch.Tensor, *, dim: int, world: World) -> torch.Tensor:
    return x.chunk(world.size, dim)[world.rank]


def _rates(world: World) -> dict[str, float]:
    """Return bytes per second of a large message to the next rank, by transport; empty on one rank."""
    if world.size == 1:
        return {}
    ring = ((world.rank + 1) % world.size, (world.rank - 1) % world.size)
    size = MESSAGE[world.device.type]
    return {
        name: size / time_exchanges(transport, world.device, ring, (size,))[0][1]
        for name, transport in open_transports(world.device, size).items()
    }


def main() -> int:
    """Run as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, CallFlags)
    flags = from_flags(CallFlags, parser.parse_args())
    try:
        world = join(flags.device)
        found = measure(flags, world)
    except DistAttentionError as error:
        print(f"doctor: one distributed call: {error}", file=sys.stderr)
        return 2
    if world.rank == 0:
        text = json.dumps(found, indent=1) + "\n"
        Path(flags.out).write_text(text, encoding="utf-8") if flags.out else print(text)
    world.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
