"""`dfa-megatron trace`: run one attention on real ranks, and lay what it did over its simulation."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.flags import add_flags, flag, from_flags


@dataclass(frozen=True)
class TraceFlags:
    """The flags of the command beside the options of distributed attention."""

    ranks: int | None = flag(None, "default: one per GPU, two without GPUs", metavar="N")
    device: str = flag("auto", "where to run", choices=("auto", "cuda", "cpu"))
    seq_length: int | None = flag(None, "tokens of all ranks together (default: 32768, on CPU 1024)", metavar="N")
    heads: int | None = flag(None, "query heads (default: 32, on CPU 4)", metavar="N")
    kv_heads: int | None = flag(None, "default: as many as heads", metavar="N")
    head_dim: int = flag(128, "of a head", metavar="N")
    layout: str = flag("contiguous", "the tokens a rank holds", choices=("contiguous", "zigzag"))
    out: str = flag("trace.json", "the trace", metavar="FILE")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="record one attention on real ranks beside its simulation",
        description=__doc__,
        epilog="Started by torchrun it is one of its ranks; otherwise it starts the ranks itself.",
    )
    add_flags(parser, TraceFlags)
    DistAttentionConfig.add_arguments(parser, "function", prefix="--")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one; return the exit status."""
    from dfa_megatron.doctor.start_ranks import device_of, ranks_here, start

    flags = from_flags(TraceFlags, args)
    device = device_of(flags.device)
    if "RANK" not in os.environ:
        return start(["-m", "dfa_megatron.cli.main", *args.argv], ranks_here(flags.ranks, device))
    length, heads = (32768, 32) if device == "cuda" else (1024, 4)
    flags = dataclasses.replace(flags, seq_length=flags.seq_length or length, heads=flags.heads or heads)
    return _rank(flags, DistAttentionConfig.from_args(args, prefix=""), device)


def _rank(args: TraceFlags, options: DistAttentionConfig, device: str) -> int:
    from dfa_megatron.doctor.world import join
    from dfa_megatron.plan.draw.chrome import trace

    assert args.seq_length is not None, "the caller has filled it in"
    world = join(device)
    simulated, measured = _both(args, options, device)
    if world.rank == 0:
        title = f"{options.schedule} schedule, {args.seq_length:,} tokens, {world.size} ranks"
        Path(args.out).write_text(trace(title, simulated, measured), encoding="utf-8")
        for (plan, model), (_, real) in zip(simulated, measured, strict=True):
            off = model.makespan / real.makespan - 1
            print(
                f"{plan.phase.name:8s} simulated {1e3 * model.makespan:8.3f} ms, measured "
                f"{1e3 * real.makespan:8.3f} ms ({off:+.0%}), compute {real.utilisation:.0%} of it"
            )
        print(f"{args.out}: open it in ui.perfetto.dev or chrome://tracing")
    world.leave()
    return 0


def _both(args: TraceFlags, options: DistAttentionConfig, device: str) -> tuple[Any, Any]:
    """Return the phases with their simulated and with their measured timelines; collective."""
    import torch
    import torch.distributed as dist

    from dfa_megatron import dist_flash_attn_func
    from dfa_megatron.doctor.recording import gathered, record
    from dfa_megatron.plan.cost.simulate import simulate
    from dfa_megatron.runtime.prepare import in_use
    from dfa_megatron.runtime.problem import profile_of

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    assert args.seq_length is not None and args.heads is not None, "the caller has filled them in"  # noqa: PT018
    counts = (args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads, args.heads)
    local = args.seq_length // dist.get_world_size()
    q, k, v, dout = (torch.randn(1, local, count, args.head_dim, device=device, dtype=dtype) for count in counts)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        out = dist_flash_attn_func(*inputs, causal=True, layout=args.layout, config=options)
        torch.autograd.grad(out, inputs, dout)

    for _ in range(3):
        step()
    dist.barrier()
    with record() as recording:
        step()
    prepared = in_use()[-1]
    hardware = profile_of(options.hardware, device == "cuda", prepared.channel, prepared.kernel.name)
    shape = prepared.rank_plan.problem.shape
    phases = (prepared.plan.forward, prepared.plan.backward)
    return (
        [(plan, simulate(plan, shape, hardware)) for plan in phases],
        [(plan, gathered(recording, plan, prepared.channel)) for plan in phases],
    )
