"""Measure distributed calls on the ranks of this machine: errors against float64, time, and the rate of the links.

torchrun --nproc-per-node 4 -m dfa_megatron.doctor.distributed_call --seq-length 32768
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.doctor.dense import band_of
from dfa_megatron.doctor.kernel_trial import Trial, distances, exact, wrong
from dfa_megatron.doctor.link_probe import open_transports, time_exchanges
from dfa_megatron.doctor.start_ranks import start
from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask, documents
from dfa_megatron.runtime.prepare import in_use
from dfa_megatron.sharding import layout_of_tokens, positions_of

MESSAGE = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Bytes of the message whose rate is reported, by kind of device."""
_SHORT = 64
"""Tokens per rank of the calls that are compared."""
SLACK = 3.0
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
    """Compare short calls, time a long one, and time a message over each transport; collective.

    Returns:
        ranks, kernel, schedule; errors by case and result; `wrong`, those beyond the limit; `refused`, reasons by case;
        seconds of a forward and its backward on the slowest rank; bytes per second each way by transport.
    """
    dtype = getattr(torch, flags.dtype)
    long = Trial(
        q_len=flags.seq_length, kv_len=flags.seq_length, band=CAUSAL, heads=flags.heads, kv_heads=flags.kv_heads,
        head_dim=flags.head_dim, head_dim_v=flags.head_dim, dtype=dtype, device=str(world.device),
    )  # fmt: skip
    short = replace(long, q_len=_SHORT * world.size, kv_len=_SHORT * world.size)
    found, refused = dict[str, dict[str, float]](), dict[str, str]()
    for name, case in _cases(short.q_len, world.size).items():
        try:
            found[name] = compare(case, short, world)
        except UnsupportedError as error:  # alike on every rank
            refused[name] = str(error)
    q, k, v, dout = (x.chunk(world.size, 1)[world.rank].clone() for x in long.inputs())
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
        "wrong": [f"{case} {name}" for case, errors in found.items() for name in wrong(errors, dtype, SLACK)],
        "refused": refused,
        "seconds": world.slowest([statistics.median(times[2:])])[0],
        "bytes_per_second": _rates(world),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """An attention to compare: the pairs that count, the tokens of each rank, and the public function's options."""

    visible: Band | Mask
    layout: Layout
    options: Mapping[str, Any]


def _cases(tokens: int, ranks: int) -> dict[str, Case]:
    """Return what short calls are asked: every kind of mask, a cap, and documents in a layout of their own."""
    whole, offsets = layout_of_tokens("contiguous", tokens, ranks), (0, 1, 1 + tokens // 3, tokens)
    lengths = [b - a for a, b in pairwise(offsets)]
    packed = layout_of_tokens("load_balanced", tokens, ranks, offsets)
    window = (_SHORT * 3 // 4, 0)
    return {
        "causal": Case(CAUSAL, whole, {"causal": True}),
        "window": Case(band_of(True, window), whole, {"causal": True, "window_size": window}),
        "softcap": Case(FULL, whole, {"causal": False, "softcap": 2.0}),
        "pack": Case(
            documents(lengths), packed, {"causal": True, "cu_seqlens": offsets, "layout": "load_balanced"}
        ),
    }  # fmt: skip


def compare(case: Case, trial: Trial, world: World) -> dict[str, float]:
    """Return the largest error over the ranks of each result, relative to dense float64 attention; collective.

    Raises:
        UnsupportedError: nothing serves the case.
    """
    inputs, here = trial.inputs(), positions_of(case.layout, world.rank, world.device)
    q, k, v, dout = (x[:, here] for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "cu_seqlens" in case.options:
        packed = dist_flash_attn_varlen_func(q[0], k[0], v[0], return_lse=True, **case.options)
        out, lse = packed[0][None], packed[1][None]
    else:
        out, lse = dist_flash_attn_func(q, k, v, return_lse=True, **case.options)
    got = (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))
    exactly = exact(inputs, case.visible, case.options.get("softcap", 0.0))
    mine = distances(got, [x[:, :, here] if x.dim() == 3 else x[:, here] for x in exactly], dout, trial.kv_len)
    return dict(zip(mine, world.slowest(mine.values()), strict=True))


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
