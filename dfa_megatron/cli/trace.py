"""`dfa-megatron trace`: run one attention on real ranks, and lay what it did over its simulation."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from dfa_megatron.names import KERNELS, SCHEDULES, TRANSPORTS


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="record one attention on real ranks beside its simulation",
        description=__doc__,
        epilog="Started by torchrun it is one of its ranks; otherwise it starts the ranks itself.",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="default: one per GPU, two without GPUs")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument(
        "--seq-length", type=int, default=32768, metavar="N", help="of all ranks (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--kv-heads", type=int, metavar="N", help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--schedule", default="auto", choices=SCHEDULES)
    parser.add_argument("--kernel", default="auto", choices=KERNELS)
    parser.add_argument("--transport", default="auto", choices=TRANSPORTS)
    parser.add_argument(
        "--hardware", default="auto", metavar="NAME", help="to simulate (default: what `auto` takes for this machine)"
    )
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one; returns the exit status."""
    from dfa_megatron.doctor.start_ranks import device_of, start

    device = device_of(args.device)
    if "RANK" not in os.environ:
        return start("dfa_megatron.cli.main", args.argv, args.ranks, device)
    return _rank(args, device)


def _rank(args: argparse.Namespace, device: str) -> int:
    from dfa_megatron.doctor.world import join
    from dfa_megatron.plan.draw.chrome import trace

    world = join(device)
    simulated, measured = _both(args, device)
    if world.rank == 0:
        title = f"{args.schedule} schedule, {args.seq_length:,} tokens, {world.size} ranks"
        args.out.write_text(trace(title, simulated, measured), encoding="utf-8")
        for (plan, model), (_, real) in zip(simulated, measured, strict=True):
            off = model.makespan / real.makespan - 1
            print(
                f"{plan.phase.name:8s} simulated {1e3 * model.makespan:8.3f} ms, measured "
                f"{1e3 * real.makespan:8.3f} ms ({off:+.0%}), compute {real.utilisation:.0%} of it"
            )
        print(f"{args.out}: open it in ui.perfetto.dev or chrome://tracing")
    world.leave()
    return 0


def _both(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """The phases with their simulated and with their measured timelines; collective."""
    import torch
    import torch.distributed as dist

    from dfa_megatron import dist_flash_attn_func
    from dfa_megatron.doctor.recording import gathered, record
    from dfa_megatron.plan.cost.simulate import simulate
    from dfa_megatron.plan.schedules import SCHEDULES as KNOWN
    from dfa_megatron.runtime.inputs import shape_of
    from dfa_megatron.runtime.machine import profile_of
    from dfa_megatron.runtime.prepare import in_use

    layout = KNOWN[args.schedule].layout if args.schedule in KNOWN else "contiguous"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    counts = (args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads, args.heads)
    local = args.seq_length // dist.get_world_size()
    q, k, v, dout = (torch.randn(1, local, count, args.head_dim, device=device, dtype=dtype) for count in counts)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        out = dist_flash_attn_func(
            *inputs, layout=layout, schedule=args.schedule, kernel=args.kernel, transport=args.transport
        )
        torch.autograd.grad(out, inputs, dout)

    for _ in range(3):
        step()
    dist.barrier()
    with record() as recording:
        step()
    prepared = in_use()[-1]
    hardware = profile_of(args.hardware, device == "cuda", prepared.channel, prepared.kernel.name)
    shape = dataclasses.replace(shape_of(prepared.request, q, k, v), backward_needs=prepared.format.backward_needs)
    phases = (prepared.plan.forward, prepared.plan.backward)
    return (
        [(plan, simulate(plan, shape, hardware)) for plan in phases],
        [(plan, gathered(recording, plan, prepared.channel)) for plan in phases],
    )
