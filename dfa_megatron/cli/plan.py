"""`dfa-megatron plan`: show a schedule, what it costs, and write it as a picture or text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from dfa_megatron.cli.draw import draw
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.names import LAYOUTS, SCHEDULES, nearest
from dfa_megatron.plan.cost.choose import Candidate, best, candidates, make_plan, simulate
from dfa_megatron.plan.cost.hardware import PROFILES, Hardware, profile_named
from dfa_megatron.plan.degree import automatic_degree, split_heads
from dfa_megatron.plan.language import mask as masks
from dfa_megatron.plan.language.geometry import UNBOUNDED, Span, Tile
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.language.text import to_text
from dfa_megatron.plan.language.tree import prompt_tree
from dfa_megatron.plan.language.work import TIE
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules import layout_of

WIDTH = 100
"""Columns of the report."""

MASKS: dict[str, Callable[[PlanFlags], Mask]] = {
    "causal": lambda flags: masks.causal(flags.seq_length),
    "full": lambda flags: masks.full(flags.seq_length),
    "window": lambda flags: masks.sliding_window(flags.seq_length, *flags.window_size),
    "documents": lambda flags: masks.documents(_documents(flags)),
    "full-documents": lambda flags: masks.documents(_documents(flags), causal=False),
    "window-documents": lambda flags: masks.documents(_documents(flags), causal=False, window_size=flags.window_size),
    "prefix": lambda flags: masks.prefix_lm(flags.seq_length, flags.prefix),
    "prefix-documents": lambda flags: masks.prefix_lm_documents(_documents(flags), flags.prefix),
    "prompt-tree": lambda flags: prompt_tree(_documents(flags), _parents(flags)),
    "causal-blockwise": lambda flags: masks.causal_blockwise(_documents(flags)),
    "block-causal": lambda flags: masks.block_causal_documents(_documents(flags), flags.block),
    "global-window": lambda flags: masks.global_sliding(flags.seq_length, max(flags.window_size), flags.prefix),
}

_TREE = '{"lengths": [16, 8, 8], "parents": [-1, 0, 0]}, or "window" beside them'
_TILES = '{"length": 32, "tiles": [[q_lo, q_hi, kv_lo, kv_hi, lo or null, hi or null], ...]}'
"""What files of trees and of masks hold."""


@dataclass(frozen=True)
class PlanFlags:
    """The flags of the command."""

    ranks: int = flag(8, "ranks that share the sequence")
    schedule: str = flag("auto", ", ".join(SCHEDULES))
    layout: str = flag("auto", "auto, " + ", ".join(LAYOUTS))
    ulysses_degree: int | str = flag(1, "ranks that exchange heads for tokens around the schedule, or auto")
    seq_length: int = flag(65536, "tokens of all ranks")
    mask: str = flag("causal", ", ".join(MASKS) + ", or a .json file: " + _TILES, group="mask")
    tree: Path | None = flag(None, "in place of --mask, a .json file: " + _TREE, group="mask", metavar="FILE")
    window_size: tuple[int, int] = flag((4096, 0), "for masks of windows", group="mask", metavar=("LEFT", "RIGHT"))
    documents: str = flag("", "lengths, for masks of documents and segments", group="mask", metavar="N,N,...")
    parents: str = flag("", "of segments, after `=` (default: the first's children)", group="mask", metavar="-1,0,...")
    prefix: int = flag(0, "tokens that all see", group="mask", metavar="N")
    block: int = flag(1024, "tokens of a block, for --mask block-causal", group="mask", metavar="N")
    batch: int = flag(1, "sequences", group="attention")
    heads: int = flag(32, "query heads", group="attention")
    kv_heads: int | None = flag(None, "key and value heads (default: as many as query heads)", group="attention")
    head_dim: int = flag(128, "of a head", group="attention")
    backward_needs: str = flag("out", "what a helped pair's backward sends: out, delta", group="attention")
    hardware: str = flag("h200-nvlink", ", ".join(PROFILES), group="machine")
    link: float | None = flag(
        None, "bytes per second each way, in place of the profile's", group="machine", metavar="GB/S"
    )
    explain: bool = flag(False, "compare all candidates of a named schedule, too", group="output")
    svg: Path | None = flag(None, "write a picture of the simulated run", group="output", metavar="FILE")
    text: Path | None = flag(None, "write the plan itself, for `dfa-megatron run`", group="output", metavar="FILE")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to the result of `argparse.ArgumentParser.add_subparsers`."""
    parser = subparsers.add_parser("plan", help="show a schedule and what it costs", description=__doc__)
    add_flags(parser, PlanFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report and write the files; return the exit status.

    Raises:
        UnsupportedError: a value that cannot be served.
        OSError: a file that cannot be written.
    """
    flags = from_flags(PlanFlags, args)
    mask, hardware = _mask(flags), _hardware(flags)
    choice: dict[str, Any] = {"schedule": flags.schedule, "layout": flags.layout}
    needs = cast(Any, flags.backward_needs)
    kv_heads = flags.heads if flags.kv_heads is None else flags.kv_heads
    whole = Sizes(flags.batch, flags.heads, kv_heads, flags.head_dim, backward_needs=needs)
    degree = DistAttentionConfig(ulysses_degree=flags.ulysses_degree).ulysses_degree
    if isinstance(degree, str):
        degree = automatic_degree(mask, flags.ranks, whole.heads, kv_heads, flags.schedule, hardware)
    heads, ranks = split_heads(degree, flags.ranks, whole.heads, kv_heads), flags.ranks // degree
    sizes = dataclasses.replace(whole, heads=heads.heads, kv_heads=heads.kv_heads)
    if (nodes := hardware.ranks_per_node) is not None:
        hardware = dataclasses.replace(hardware, ranks_per_node=max(1, nodes // degree))
    plan = make_plan(mask, ranks, sizes=sizes, hardware=hardware, **choice)
    held = layout_of(plan.layout, mask, flags.ranks).merged(degree)
    if held.joined() != plan.forward.layout.joined():  # neighbours hold other tokens than a rank of so few would
        plan = make_plan(mask, ranks, sizes=sizes, hardware=hardware, schedule=flags.schedule, layout=held)
    print(report(plan, sizes, hardware))
    if flags.ulysses_degree == "auto":
        print(f"\nulysses_degree=auto is {degree} here")
    if degree > 1:
        of = f"{ranks} rank{'s' * (ranks > 1)} with {heads.heads} heads and {heads.kv_heads} kv heads"
        print(f"\naround it, not simulated: {degree} neighbours each of {flags.ranks} ranks exchange heads for tokens")
        print(f"the plan    is of {of}")
    if ranks == 1:
        print("\none rank computes whole sequences, of its heads: all schedules are the same")
    elif flags.explain or flags.schedule == "auto":
        looked_at = candidates(mask, ranks, sizes=sizes, layout=flags.layout, hardware=hardware)
        title = f"auto took {plan.schedule}" if flags.schedule == "auto" else f"the candidates on {hardware.name}"
        print(f"\n{title}; ms of both passes, or of the host if a layer cannot hide it:\n{explain(looked_at)}")
    if flags.svg is not None:
        flags.svg.write_text(draw(plan, "svg", sizes=sizes, hardware=hardware), encoding="utf-8")
    if flags.text is not None:
        flags.text.write_text(to_text(plan), encoding="utf-8")
    return 0


def _mask(flags: PlanFlags) -> Mask:
    if flags.tree is not None or flags.mask.endswith(".json"):
        return _from_file(flags.tree or Path(flags.mask), is_tree=flags.tree is not None)
    if flags.mask not in MASKS:
        raise UnsupportedError(f"mask {flags.mask!r}", "there is no such mask", nearest(flags.mask, MASKS))
    try:
        return MASKS[flags.mask](flags)
    except UnsupportedError:
        raise
    except ValueError as error:
        what = f"mask {flags.mask!r} of {flags.seq_length} tokens"
        raise UnsupportedError(what, str(error), "other values of its flags") from error


def _from_file(path: Path, *, is_tree: bool) -> Mask:
    """Return the tree or the union of tiles that a file describes."""
    instead = _TREE if is_tree else _TILES
    try:
        value = json.loads(path.read_text("utf-8"))
        if is_tree:
            return prompt_tree(value["lengths"], value["parents"], window=value.get("window", -1))
        tiles = [
            Tile(Span(a, b), Span(c, d), -UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi)
            for a, b, c, d, lo, hi in value["tiles"]
        ]
        if any(type(number) is not int for tile in value["tiles"] for number in tile if number is not None):
            raise ValueError("a number is not whole")
        return masks.union(str(value.get("name", path.stem)), value["length"], tiles)
    except (ValueError, TypeError, AttributeError) as error:
        raise UnsupportedError(str(path), str(error), instead) from error
    except KeyError as error:
        raise UnsupportedError(str(path), f"it lacks {error}", instead) from error


def report(plan: AttentionPlan, sizes: Sizes, hardware: Hardware) -> str:
    """Return the grid of each phase and its cost."""
    lines = [f"{plan}, layout {plan.layout}, digest {plan.digest}"]
    for one in plan.phases:
        timeline = simulate(one, sizes, hardware)
        slots = [program.peak_slots() for program in lower_all(one, sizes.batch)]
        peak = {name: max(slot.get(name, 0) for slot in slots) for name in sorted({n for slot in slots for n in slot})}
        lines += [
            "",
            draw(one, width=WIDTH),
            f"simulated on {hardware.name}: {1e3 * timeline.makespan:.3f} ms, idle {100 * timeline.idle_share:.1f} %",
            *_per_rank("MB sent", timeline.sent),
            *_per_rank("MB received", timeline.received),
            "peak slots  " + (", ".join(f"{count} {name}" for name, count in peak.items()) or "none"),
        ]
    return "\n".join(lines)


def explain(looked_at: tuple[Candidate, ...]) -> str:
    """Format candidates as a table, the cheapest first, with the cost or the refusal of each.

    A star marks the choice of `auto`.
    """
    taken = best(looked_at)
    order = sorted(looked_at, key=lambda candidate: candidate.seconds)
    width = max(len(candidate.name) for candidate in looked_at) + 2
    lines = [f"  {'schedule':{width}s} {'ms':>9s} {'idle':>6s} {'MB sent':>9s}  why"]
    for one in order:
        figures, why = f"{'-':>9s} {'':16s}", one.refusal
        if one.cost is not None:
            idle = 1 - fmean(one.cost.busy) / one.seconds if one.seconds else 0.0
            figures = f"{1e3 * one.seconds:9.3f} {100 * idle:5.1f}% {max(one.cost.sent) / 1e6:9.1f}"
            more = one.seconds / order[0].seconds - 1
            why = "a tie" if more <= TIE else f"{100 * more:.0f} % slower"
        if one is taken:
            why = "taken: the cheapest" if one is order[0] else "taken: a tie with the cheapest, and simpler than it"
        lines.append(f"{'* ' if one is taken else '  '}{one.name:{width}s} {figures}  {why}")
    return "\n".join(lines)


def _per_rank(name: str, nbytes: tuple[int, ...]) -> list[str]:
    """Format megabytes of rank 0, 1, ..., wrapped."""
    values, count = [f"{value / 1e6:8.1f}" for value in nbytes], (WIDTH - 12) // 9
    rows = [" ".join(values[first : first + count]) for first in range(0, len(values), count)]
    return [f"{name if row is rows[0] else '':11s} {row}" for row in rows]


def _hardware(flags: PlanFlags) -> Hardware:
    hardware = profile_named(flags.hardware)
    if flags.link is None:
        return hardware
    if not 0 < flags.link < math.inf:
        raise UnsupportedError(f"--link {flags.link:g}", "it must be positive and finite", "for example 25")
    link = dataclasses.replace(hardware.link, bytes_per_second=1e9 * flags.link)
    return dataclasses.replace(hardware, name=f"{hardware.name} at {flags.link:g} GB/s", link=link)


def _documents(flags: PlanFlags) -> list[int]:
    lengths = [int(length) for length in flags.documents.split(",") if length.strip()]
    if (total := sum(lengths)) != flags.seq_length:
        instead = f"--seq-length {total}" if lengths and min(lengths) > 0 else f"--documents {flags.seq_length}"
        why = f"they add up to {total} tokens, --seq-length is {flags.seq_length}"
        raise UnsupportedError("--documents", why, instead)
    return lengths


def _parents(flags: PlanFlags) -> list[int]:
    """Return the parents that were given; without any, the first segment is a question and the others its answers."""
    if flags.parents:
        return [int(parent) for parent in flags.parents.split(",")]
    return [-1] + [0] * (len(_documents(flags)) - 1)
