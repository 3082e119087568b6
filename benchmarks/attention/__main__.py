"""`python -m benchmarks.attention`: time distributed attention beside others, after each is compared with dense."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.job import ABLATIONS, DTYPES, INSTALLED, MASKS, PASSES, PEERS, PRESETS, Job, head_pairs
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.names import KERNELS, SCHEDULES, TRANSPORTS

DEFAULTS: dict[str, Any] = {
    "seq_length": (32768, 131072),
    "heads": (32,),
    "kv_heads": None,
    "head_dim": (128,),
    "mask": ("causal",),
    "schedule": ("auto",),
    "kernel": ("auto",),
    "transport": ("auto",),
    "ablation": ("none",),
    "ulysses_degree": (1,),
}
"""What neither a flag nor --preset says."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        epilog="Started by torchrun it is one of its ranks; otherwise it starts the ranks itself.",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="default: one per GPU, two without GPUs")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--preset", choices=PRESETS, help="a set of the flags below; those given here go before it")
    shape = parser.add_argument_group("attention: every combination is measured")
    shape.add_argument("--seq-length", type=int, nargs="+", metavar="N", help="tokens of all ranks together")
    shape.add_argument("--heads", type=int, nargs="+", metavar="N", help="query heads (default: 32)")
    shape.add_argument(
        "--kv-heads", type=int, nargs="+", metavar="N", help="taken in pairs with --heads where there are as many"
    )
    shape.add_argument("--head-dim", type=int, nargs=1, metavar="N", help="default: 128")
    shape.add_argument("--mask", nargs="+", choices=MASKS, help="default: causal")
    shape.add_argument("--window", type=int, default=4096, metavar="N", help="tokens back, for the mask window")
    shape.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, float32 on a CPU")
    _add_methods(parser)
    how = parser.add_argument_group("measurement")
    how.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: both of them")
    how.add_argument("--repetitions", type=int, default=5, metavar="N", help="at least (default: %(default)s)")
    how.add_argument("--seconds", type=float, default=0.3, metavar="S", help="and until so many are spent on a pass")
    how.add_argument("--budget", type=float, default=0.0, metavar="S", help="seconds for all; what is left is named")
    how.add_argument("--out", type=Path, metavar="FOLDER", help="for the results (default: runs/bench-DATE-TIME)")
    return parser


def _add_methods(parser: argparse.ArgumentParser) -> None:
    ours = parser.add_argument_group("methods: every combination, and the peers")
    ours.add_argument("--schedule", nargs="+", choices=SCHEDULES, help="default: auto")
    ours.add_argument("--kernel", nargs="+", choices=KERNELS, help="also of the all-to-all peers (default: auto)")
    ours.add_argument("--transport", nargs="+", choices=TRANSPORTS, help="default: auto")
    ours.add_argument("--ulysses-degree", type=int, nargs="+", metavar="N", help="default: 1")
    ours.add_argument("--cuda-graph", action="store_true", help="each of ours as CUDA graphs too")
    ours.add_argument("--ablation", nargs="+", choices=ABLATIONS, help="default: none")
    ours.add_argument(
        "--peers", nargs="*", choices=PEERS, metavar="NAME", help=f"what is installed, or some of {', '.join(PEERS)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one; returns the exit status: 2 for a request that cannot be served."""
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return run(build_parser().parse_args(given), given)
    except (DistAttentionError, OSError) as error:
        print(f"benchmarks.attention: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks, or be one; returns the exit status.

    Raises:
        UnsupportedError: a value that cannot be served.
    """
    is_rank = "RANK" in os.environ
    try:
        from benchmarks.attention import launch_ranks as launch
        from benchmarks.attention.baselines import peer_methods
        from dfa_megatron.doctor.start_ranks import device_of, start

        job = job_of(args, device_of(args.device))
        if is_rank:
            return launch.run_rank(job)
        peer_methods(job)  # a peer that does not run here is refused before ranks are started
        return start("benchmarks.attention", [*argv, "--out", job.out], args.ranks, job.device)
    except DistAttentionError:
        if is_rank and os.environ["RANK"] != "0":  # every rank has the same error, and one says it
            return 2
        raise


def job_of(args: argparse.Namespace, device: str) -> Job:
    """The job that the flags, the preset and the defaults describe, in this order.

    Raises:
        UnsupportedError: heads that kv_heads do not divide.
    """
    preset = PRESETS.get(args.preset, {})
    chosen: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        given = getattr(args, name)
        chosen[name] = tuple(given) if given is not None else preset.get(name, default)
    kv_heads = chosen.pop("kv_heads")
    if args.heads is not None and args.kv_heads is None:
        kv_heads = None  # the preset's belong to the preset's heads
    return Job(
        **chosen | {"heads": head_pairs(chosen["heads"], kv_heads), "head_dim": chosen["head_dim"][0]},
        window=args.window,
        dtype=args.dtype or ("bfloat16" if device == "cuda" else "float32"),
        cuda_graph=(False, True) if args.cuda_graph else (False,),
        peers=() if args.peers is None else tuple(args.peers or (INSTALLED,)),
        passes=tuple(name for name in PASSES if name in args.passes),
        repetitions=args.repetitions,
        seconds=args.seconds,
        budget=args.budget,
        out=str(args.out or Path("runs", time.strftime("bench-%Y%m%d-%H%M%S"))),
        device=device,
    )


if __name__ == "__main__":
    sys.exit(main())
