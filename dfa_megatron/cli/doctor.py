"""`dfa-megatron doctor`: what this machine has, and whether each kernel that claims to work here is right and fast."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfa_megatron.doctor.kernel_survey import Verdict
    from dfa_megatron.doctor.kernel_trial import Trial

DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check this machine: versions, devices, links, and every kernel against float64",
        description=__doc__,
        epilog="Exit status: 0, or 1 if a kernel that says that it can serve the shape is wrong or fails.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--kernel", nargs="+", default=[], help="only these (default: all)")
    shape = parser.add_argument_group("the attention that is timed")
    shape.add_argument("--length", type=int, help="tokens (default: 32768, on CPU 256)")
    shape.add_argument("--heads", type=int, help="query heads (default: 32, on CPU 4)")
    shape.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=int, default=128, help="of a head (default: %(default)s)")
    shape.add_argument("--mask", choices=("causal", "full"), default="causal", help="default: %(default)s")
    shape.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, on CPU float32")
    shape.add_argument("--repetitions", type=int, default=7, help="timed calls; the median counts (default: 7)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON in place of tables")
    out.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measure a hardware profile for schedule='auto' and `plan --hardware`, and save it as JSON: the kernel's "
        "rate by block length and its launch overhead; under torchrun also rate and latency of the links",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the parsed arguments; returns the exit status."""
    if args.profile is not None:
        from dfa_megatron.doctor.measure_profile import measure_and_save

        return measure_and_save(args, shape_of(args))
    from dfa_megatron.doctor.kernel_survey import automatic, examine
    from dfa_megatron.doctor.machine import devices, p2p_access, versions

    shape = shape_of(args)
    machine = {"versions": versions(), "devices": devices(), "p2p_access": p2p_access()}
    if not args.json:
        print(_machine(machine))

    def tell(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{name:<12}", end="\r", file=sys.stderr, flush=True)

    verdicts, auto = examine(shape, args.kernel, args.repetitions, tell), automatic(shape)
    if args.json:
        report = machine | {
            "shape": {"q_len": shape.q_len, "heads": shape.heads, "kv_heads": shape.kv_heads}
            | {"head_dim": shape.head_dim, "mask": args.mask, "dtype": str(shape.dtype), "device": shape.device},
            "kernels": [verdict.as_json() for verdict in verdicts],
            "auto": auto,
        }
        print(json.dumps(report, indent=1))
    else:
        print(_kernels(shape, args.mask, verdicts, auto))
    return 1 if any(verdict.wrong for verdict in verdicts) else 0


def shape_of(args: argparse.Namespace) -> Trial:
    """The attention that the flags describe.

    Raises:
        UnsupportedError: a count is not positive, kv_heads does not divide heads, or there is no such device.
    """
    import torch

    from dfa_megatron.doctor.kernel_trial import Trial
    from dfa_megatron.errors import UnsupportedError
    from dfa_megatron.plan.language.geometry import CAUSAL, FULL

    present = torch.cuda.is_available()
    if args.device == "cuda" and not present:
        raise UnsupportedError("--device cuda", "PyTorch finds no CUDA device", "--device cpu")
    device = args.device or ("cuda" if present else "cpu")
    on_cpu = device == "cpu"
    length, heads = args.length or (256 if on_cpu else 32768), args.heads or (4 if on_cpu else 32)
    kv_heads = args.kv_heads or heads
    if min(length, heads, kv_heads, args.head_dim, args.repetitions) < 1:
        raise UnsupportedError("a count below 1", "it must be positive", "1 or more")
    if heads % kv_heads:
        raise UnsupportedError(f"{heads} heads on {kv_heads}", "heads must be a multiple of kv_heads", "equal counts")
    return Trial(
        q_len=length, kv_len=length, band=CAUSAL if args.mask == "causal" else FULL, heads=heads, kv_heads=kv_heads,
        head_dim=args.head_dim, head_dim_v=args.head_dim, device=device,
        dtype=getattr(torch, args.dtype or ("float32" if on_cpu else "bfloat16")),
    )  # fmt: skip


def _machine(machine: dict[str, Any]) -> str:
    lines = ["versions"]
    lines += textwrap.wrap(
        ", ".join(f"{name} {found}" for name, found in machine["versions"].items()), 110,
        initial_indent="  ", subsequent_indent="  ",
    )  # fmt: skip
    lines.append("devices")
    for gpu in machine["devices"]:
        where = f"{gpu['gib']} GiB, {gpu['multiprocessors']} multiprocessors"
        lines.append(f"  cuda:{gpu['index']}  {gpu['name']}, compute capability {gpu['capability']}, {where}")
    if not machine["devices"]:
        lines.append("  no CUDA device")
    if len(machine["p2p_access"]) > 1:
        lines.append("links (+ direct access to the other's memory, - through the host)")
        for index, row in enumerate(machine["p2p_access"]):
            lines.append(f"  cuda:{index}  " + " ".join("+-"[not reached] for reached in row))
    return "\n".join(lines)


def _kernels(shape: Trial, mask: str, verdicts: list[Verdict], auto: str | None) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    heads = f"{shape.heads} heads on {shape.kv_heads} of {shape.head_dim}"
    lines = [
        f"kernels: {dtype} on {shape.device}, {heads}; rates: {mask}, {shape.q_len} tokens",
        f"  {'':<10}{'largest error against float64 of':<42}{'TFLOP/s':>16}",
        f"  {'':<10}" + "".join(f"{name:>8}" for name in ("out", "lse", "dq", "dk", "dv")) + "   forward / backward",
    ]
    for verdict in verdicts:
        lines += _lines(verdict)
    lines.append(f"kernel='auto' takes {auto}" if auto else "kernel='auto' finds none: every kernel refuses")
    if bad := [verdict.name for verdict in verdicts if verdict.wrong]:
        lines.append(f"WRONG: {', '.join(bad)}")
    return "\n".join(lines)


def _lines(verdict: Verdict) -> list[str]:
    if verdict.refused is not None:
        return [f"  {verdict.name:<10}refused: {verdict.refused}"]
    worst = {
        name: max(errors[name] for errors in verdict.errors.values()) for name in ("out", "lse", "dq", "dk", "dv")
    } if verdict.errors else {}  # fmt: skip
    line = f"  {verdict.name:<10}" + "".join(f"{error:>8.0e}" for error in worst.values())
    if verdict.tflops:
        forward, backward = (_rate(verdict.tflops[phase]) for phase in ("forward", "backward"))
        line += f"   {forward:>7} / {backward}"
    lines = [line + (f"   not timed: {verdict.untimed}" if verdict.untimed else "")]
    lines += [f"  {'':<10}  without {verdict.without}"] if verdict.without else []
    return lines + [f"  {'':<10}  WRONG: {what}" for what in verdict.wrong]


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"
