"""`dfa-megatron plan`: show a schedule, what it costs, and write it as a picture, a trace or text."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dfa_megatron.argument_file import read_arguments
from dfa_megatron.cli import memory_estimate as models
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS, SCHEDULES
from dfa_megatron.plan.cost.choose import Candidate, automatic_degree, candidates, make_plan
from dfa_megatron.plan.cost.explain import explain
from dfa_megatron.plan.cost.hardware import PROFILES, Hardware, Link
from dfa_megatron.plan.cost.profile import profile_named
from dfa_megatron.plan.cost.simulate import simulate
from dfa_megatron.plan.draw import draw
from dfa_megatron.plan.language import mask as masks
from dfa_megatron.plan.language.heads import HeadSplit, split_heads, split_tokens
from dfa_megatron.plan.language.ir import PHASES, AttentionPlan
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.plan.language.text import to_text
from dfa_megatron.plan.lowering.lower import lower_all

MASKS: dict[str, Callable[[argparse.Namespace], Mask]] = {
    "causal": lambda args: masks.causal(args.seq_length),
    "full": lambda args: masks.full(args.seq_length),
    "window": lambda args: masks.sliding_window(args.seq_length, *args.window_size),
    "documents": lambda args: masks.documents(_documents(args)),
    "full-documents": lambda args: masks.documents(_documents(args), causal=False),
    "window-documents": lambda args: masks.documents(_documents(args), causal=False, window_size=args.window_size),
    "prefix": lambda args: masks.prefix_lm(args.seq_length, args.prefix),
    "prefix-documents": lambda args: masks.prefix_lm_documents(_documents(args), args.prefix),
    "shared-question": lambda args: masks.shared_question([_documents(args)]),
    "causal-blockwise": lambda args: masks.causal_blockwise(_documents(args)),
    "block-causal": lambda args: masks.block_causal_documents(_documents(args), args.block),
    "global-window": lambda args: masks.global_sliding(args.seq_length, max(args.window_size), args.prefix),
}

DEFAULTS = {
    "ranks": 8,
    "schedule": "auto",
    "layout": "auto",
    "ulysses_degree": "auto",
    "remat": True,
    "seq_length": 65536,
    "batch": 1,
    "heads": 32,
    "head_dim": 128,
}
"""Values that neither a flag nor --config gives."""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan", help="show a schedule and what it costs", description=__doc__
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="flags of a Megatron script, as in configs/megatron: the attention of its model, and an estimate of a "
        "GPU's memory; flags given here override it",
    )
    parser.add_argument("--ranks", type=int, help="ranks that share the sequence (default: 8)")
    parser.add_argument("--schedule", help=", ".join(SCHEDULES) + " (default: auto)")
    parser.add_argument("--layout", help="auto, " + ", ".join(LAYOUTS) + " (default: auto)")
    parser.add_argument(
        "--ulysses-degree",
        help="ranks that exchange heads for tokens around the schedule, or auto (default: auto)",
    )
    parser.add_argument(
        "--remat",
        action=argparse.BooleanOptionalAction,
        help="layers are rematerialized: a backward exchanges heads once more (default: as in --config, else yes)",
    )
    parser.add_argument("--seq-length", type=int, help="tokens of all ranks (default: 65536)")
    _add_mask(parser)
    shape = parser.add_argument_group("attention")
    shape.add_argument("--batch", type=int, help="sequences (default: 1)")
    shape.add_argument("--heads", type=int, help="query heads (default: 32)")
    shape.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    shape.add_argument("--head-dim", type=int, help="of a head (default: 128)")
    shape.add_argument(
        "--backward-needs", default="out", help="what a helped pair's backward sends: out, delta (default: out)"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--hardware",
        default="h200-nvlink",
        help=", ".join(PROFILES) + ", or a .json file of doctor --profile (default: %(default)s)",
    )
    machine.add_argument(
        "--link", type=float, metavar="GB/S", help="bytes per second each way, in place of the profile's"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--phase", default="both", choices=("both", *PHASES), help="what to show (default: %(default)s)")
    out.add_argument(
        "--explain",
        action="store_true",
        help="compare all candidates, with every degree of Ulysses (auto compares the schedules anyway)",
    )
    out.add_argument("--width", type=int, default=100, help="columns of the grid (default: %(default)s)")
    out.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the simulated run")
    out.add_argument(
        "--chrome", type=Path, metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev"
    )
    out.add_argument("--text", type=Path, metavar="FILE", help="write the plan itself, for `dfa-megatron run`")
    parser.set_defaults(run=run)


def _add_mask(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mask")
    group.add_argument("--mask", default="causal", help=", ".join(MASKS) + " (default: %(default)s)")
    group.add_argument(
        "--window-size", type=int, nargs=2, default=(4096, 0), metavar=("LEFT", "RIGHT"), help="for masks of windows"
    )
    group.add_argument("--documents", default="", metavar="N,N,...", help="lengths, for masks of documents")
    group.add_argument("--prefix", type=int, default=0, metavar="N", help="tokens that all see")
    group.add_argument(
        "--block", type=int, default=1024, metavar="N", help="tokens of a block, for --mask block-causal"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report and write the files; return the exit status.

    Raises:
        UnsupportedError: a value that cannot be served.
        OSError: a file that cannot be written.
    """
    model = None if args.config is None else models.model_of(read_arguments(args.config), str(args.config))
    _fill_in(args, model)
    mask, kept = _mask(args), not args.remat
    shape = AttentionShape(
        args.batch,
        args.heads,
        args.heads if args.kv_heads is None else args.kv_heads,
        args.head_dim,
        backward_needs=args.backward_needs,
    )
    hardware = _hardware(args)
    degree = _degree(args.ulysses_degree) or automatic_degree(
        mask, args.ranks, schedule=args.schedule, layout=args.layout, shape=shape, hardware=hardware
    )
    heads = split_heads(degree, args.ranks, shape.heads, shape.kv_heads)
    whole, shape, ranks = shape, heads.shape(shape), args.ranks // degree
    plan = make_plan(mask, ranks, schedule=args.schedule, layout=args.layout, shape=shape, hardware=hardware)
    print(report(plan, shape, hardware, args.phase, args.width))
    tokens = args.seq_length // args.ranks
    if degree > 1:
        if args.ulysses_degree == "auto":
            print(f"\nulysses_degree=auto is {degree} here")
        split_tokens(degree, 0, args.ranks, plan.layout, tokens)
        print("\n" + _exchange(heads, whole, tokens, args.ranks, kept=kept))
    if model is not None:
        sized = dataclasses.replace(model, seq_length=args.seq_length, micro_batch_size=args.batch)
        received = heads.landed(whole, tokens)
        print("\n" + models.report(sized, args.ranks, _message_bytes(plan, shape) + received))
    if args.explain:
        looked_at = candidates(
            mask, args.ranks, layout=args.layout, shape=whole, hardware=hardware, degrees=True, kept=kept
        )
        print("\n" + _comparison(f"the candidates on {hardware.name}", looked_at))
    elif args.schedule == "auto":
        looked_at = candidates(mask, ranks, layout=args.layout, shape=shape, hardware=hardware)
        print("\n" + _comparison(f"auto took {plan.schedule}", looked_at))
    _write_files(args, plan, shape, hardware)
    return 0


def _degree(asked: str | int) -> int:
    """Return the degree, or 0 for "auto"."""
    if asked == "auto":
        return 0
    if not str(asked).isdigit() or int(asked) < 1:
        raise UnsupportedError(f"ulysses_degree={asked!r}", "it is a number of ranks", "1 or more, or auto")
    return int(asked)


def _mask(args: argparse.Namespace) -> Mask:
    if args.mask not in MASKS:
        raise UnsupportedError(f"mask {args.mask!r}", "there is no such mask", "one of " + ", ".join(MASKS))
    try:
        return MASKS[args.mask](args)
    except ValueError as error:
        raise UnsupportedError(
            f"mask {args.mask!r} of {args.seq_length} tokens", str(error), "other lengths"
        ) from error


def _write_files(args: argparse.Namespace, plan: AttentionPlan, shape: AttentionShape, hardware: Hardware) -> None:
    if args.svg is not None:
        _write(args.svg, draw(plan, "svg", phase=args.phase, shape=shape, hardware=hardware))
    if args.chrome is not None:
        _write(args.chrome, draw(plan, "chrome", phase=args.phase, shape=shape, hardware=hardware))
    if args.text is not None:
        _write(args.text, to_text(plan))


def _fill_in(args: argparse.Namespace, model: models.Model | None) -> None:
    """Fill in the arguments without a flag: from the model, else the default."""
    known: dict[str, Any] = dict(DEFAULTS)
    if model is not None:
        known.update(
            ranks=model.context_parallel_size,
            schedule=model.dfa_schedule,
            ulysses_degree=model.dfa_ulysses_degree,
            remat=model.recompute_granularity == "full",
            layout="zigzag" if model.dfa_data_layout == "zigzag" else "contiguous",  # inside the layers
            seq_length=model.seq_length,
            batch=model.micro_batch_size,
            heads=model.num_attention_heads // model.tensor_model_parallel_size,
            kv_heads=max(1, model.kv_heads // model.tensor_model_parallel_size),
            head_dim=model.head_dim,
        )
    for name, value in known.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _message_bytes(plan: AttentionPlan, shape: AttentionShape) -> int:
    """Return the most bytes of a rank's slots over both phases; a slot counts as a whole chunk."""
    most = 0
    for one in plan.phases:
        tokens = max(len(chunk) for chunk in one.layout.chunks)
        for program in lower_all(one, shape.batch):
            slots = program.peak_slots().items()
            most = max(most, sum(count * bytes_of(name, tokens, shape) for name, count in slots))
    return most


def _exchange(heads: HeadSplit, whole: AttentionShape, tokens: int, ranks: int, *, kept: bool) -> str:
    """Describe the head exchange around a plan."""
    forward, backward = heads.sent(whole, tokens, kept=kept)
    return (
        f"around it, not simulated: {heads.degree} neighbours each of {ranks} ranks exchange heads for tokens\n"
        f"the plan    is of {ranks // heads.degree} ranks with {heads.heads} heads and {heads.kv_heads} kv heads\n"
        f"MB sent     {forward / 1e6:.1f} by every rank around the forward, {backward / 1e6:.1f} around the backward"
    )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def report(
    plan: AttentionPlan, shape: AttentionShape, hardware: Hardware, phase: str = "both", width: int = 100
) -> str:
    """Return the grid of each phase and its cost."""
    lines = [f"{plan}, layout {plan.layout}, digest {plan.digest}"]
    for one in (one for one in plan.phases if phase in ("both", one.phase.name)):
        timeline = simulate(one, shape, hardware)
        slots = [program.peak_slots() for program in lower_all(one, shape.batch)]
        peak = {name: max(slot.get(name, 0) for slot in slots) for name in sorted({n for slot in slots for n in slot})}
        lines += [
            "",
            draw(one, width=width),
            f"simulated on {hardware.name}: {1e3 * timeline.makespan:.3f} ms, idle {100 * timeline.idle_share:.1f} %",
            *_per_rank("MB sent", timeline.sent, width),
            *_per_rank("MB received", timeline.received, width),
            "peak slots  " + (", ".join(f"{count} {name}" for name, count in peak.items()) or "none"),
        ]
    return "\n".join(lines)


def _per_rank(name: str, nbytes: tuple[int, ...], width: int) -> list[str]:
    """Format megabytes of rank 0, 1, ..., wrapped to the width."""
    per_line = max(1, (width - 12) // 9)
    lines = []
    for first in range(0, len(nbytes), per_line):
        values = " ".join(f"{value / 1e6:8.1f}" for value in nbytes[first : first + per_line])
        lines.append(f"{name if first == 0 else '':11s} {values}")
    return lines


def _comparison(title: str, looked_at: tuple[Candidate, ...]) -> str:
    return f"{title}; forward and backward together:\n{explain(looked_at)}"


def _hardware(args: argparse.Namespace) -> Hardware:
    hardware = profile_named(args.hardware)
    if args.link is None:
        return hardware
    link = Link(hardware.link.transport, 1e9 * args.link, hardware.link.latency)
    return dataclasses.replace(hardware, name=f"{hardware.name} at {args.link:g} GB/s", links=(link,), all_to_all=None)


def _documents(args: argparse.Namespace) -> list[int]:
    lengths = [int(length) for length in args.documents.split(",") if length.strip()]
    if sum(lengths) != args.seq_length:
        raise ValueError(f"--documents add up to {sum(lengths)} tokens, --seq-length is {args.seq_length}")
    return lengths
