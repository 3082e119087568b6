"""The tables of schedules.md and schedule-theory.md, and their pictures, computed by the planner."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import partial

from dfa_megatron.cli.draw import draw
from dfa_megatron.plan.cost.choose import make_plan, simulate
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, IDEAL_LINK
from dfa_megatron.plan.language.ir import AttentionPlan, Plan, loads
from dfa_megatron.plan.language.leaves import Keys, halves, subtrees
from dfa_megatron.plan.language.mask import Mask, causal, documents
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule
from docs.measured import Lines, table

TOKENS = 65536
SHAPE = Sizes(kv_heads=8)
PACK_SHAPE = Sizes(heads=64, kv_heads=8)
FOR_PACKS = (OWNER_COMPUTES["load_balanced"], SCHEDULES["greedy"])


def label(schedule: Schedule | AttentionPlan) -> str:
    """Return what the tables call a schedule."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule.schedule
    return f"`{name}`" + (f" on {schedule.layout}" if schedule.layout != "contiguous" else "")


def sent(plan: Plan | AttentionPlan, shape: Sizes) -> str:
    """Return the megabytes that ranks send: their mean, and the most."""
    found = simulate(plan, shape).sent
    return f"{sum(found) / len(found) / 1e6:.0f} ({max(found) / 1e6:.0f})"


def costs(ranks: int) -> Lines:
    """Return what each schedule costs on one machine."""
    lines = []
    for schedule in (one for one in ALL if one not in FOR_PACKS):
        plan = schedule.plan(causal(TOKENS // (2 * ranks) * 2 * ranks), ranks)
        programs = [lower_all(phase) for phase in (plan.forward, plan.backward)]
        real = [100 * simulate(phase, SHAPE, H200_NVLINK).idle_share for phase in (plan.forward, plan.backward)]
        lines.append([
            label(schedule),
            str(1 + max(block.step for block in plan.forward.blocks)),
            str(max(sum(len(step.calls) for step in program.steps) for program in programs[0])),
            f"{100 * simulate(plan.forward, SHAPE, IDEAL_LINK).idle_share:.1f} %",
            f"{real[0]:.1f} % / {real[1]:.1f} %",
            *(sent(phase, SHAPE) for phase in (plan.forward, plan.backward)),
            " / ".join(str(max(len(program.slots) for program in phase)) for phase in programs),
        ])  # fmt: skip
    head = ["schedule", "steps", "calls a rank", "idle, bound", "idle on H200s, forward / backward",
            "MB sent, mean (most), forward", "backward", "slots, forward / backward"]  # fmt: skip
    return table(head, lines)


def choices(ranks: int) -> Lines:
    """Return what `auto` takes."""
    lines = []
    for hardware in (H200_NVLINK, H200_SLOW_LINK):
        taken = list[list[str]]()
        for tokens in (16384, 65536, 262144):
            for kv_heads in (32, 8):
                about = {"sizes": Sizes(kv_heads=kv_heads), "hardware": hardware}
                plans = (make_plan(causal(tokens), ranks, layout=one, **about) for one in ("contiguous", "auto"))
                taken.append([f"{tokens // 1024}K", str(kv_heads), *map(label, plans)])
        if len({(*one[2:],) for one in taken}) == 1:
            taken = [["any of these", "any", *taken[0][2:]]]
        lines += [[hardware.name, *one] for one in taken]
    return table(["machine", "tokens", "kv heads", "contiguous tokens", "any layout"], lines)


def pack(ranks: int, seed: int) -> Mask:
    """Return 8K tokens a rank of causal documents, log-normal around 2,000, none above a quarter of the pack."""
    rng, lengths, left = random.Random(seed), list[int](), 8192 * ranks
    while left:
        lengths.append(min(max(1, round(2000 * rng.lognormvariate(0.0, 1.2))), 2048 * ranks, left))
        left -= lengths[-1]
    return documents(lengths)


def packs() -> Lines:
    """Return what each schedule makes of packed documents."""
    lines = []
    for ranks, seed in ((4, 0), (16, 2)):
        mask = pack(ranks, seed)
        for schedule in (SCHEDULES["balanced"], *FOR_PACKS[::-1]):
            plan = schedule.plan(mask, ranks)
            load = loads(plan.forward.blocks, mask, plan.forward.layout)
            ms = 1e3 * simulate(plan, PACK_SHAPE, H200_NVLINK).makespan
            lines.append([str(ranks), f"{len(mask.tiles)} documents", label(schedule),
                          f"{max(load) * ranks / sum(load):.2f}", sent(plan, PACK_SHAPE), f"{ms:.1f}"])  # fmt: skip
    return table(["ranks", "pack", "schedule", "work, most over mean", "MB sent, mean (most)", "ms"], lines)


def trees(chunks: int = 6, counts: Sequence[int] = (1, 2, 3)) -> str:
    """Draw the tree in which a row of leaves merges, with the rank of each leaf and the partials that travel."""
    marks, high, every = list[str](), 60 + 34 * chunks.bit_length(), (*range(chunks),)
    for panel, ranks in enumerate(counts):
        left, owner = 24 + panel * (44 * chunks + 40), [leaf * ranks // chunks for leaf in every]
        owned = [tuple(leaf for leaf in every if owner[leaf] == rank) for rank in range(ranks - 1)]
        _node(every, (left, high - 46), owner, {node for keys in owned for node in subtrees(keys, every)}, marks)
        marks.append(f'<text x="{left}" y="{high - 12}">{ranks} rank{"s" * (ranks > 1)}</text>')
    wide = 24 + len(counts) * (44 * chunks + 40)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
    style = "<style>text { font: 12px system-ui, sans-serif }</style>"
    return "\n".join([head, style, f'<rect width="{wide}" height="{high}" rx="10" fill="#fff"/>', *marks, "</svg>"])


def _node(
    keys: Keys, base: tuple[int, int], owner: Sequence[int], sent: Collection[Keys], marks: list[str]
) -> tuple[float, float]:
    """Add the marks of a node and of those below it; return where the line from above ends."""
    y = base[1] - 34 * (keys[0] ^ keys[-1]).bit_length()
    below = [_node(half, base, owner, sent, marks) for half in halves(keys)] if len(keys) > 1 else []
    x = sum(x for x, _ in below) / 2 if below else base[0] + 44.0 * keys[0] + 16
    marks += [f'<path d="M{x} {y}V{y + 13}H{to}V{end}" fill="none" stroke="#8b949e"/>' for to, end in below]
    look = f'fill="{"#8b949e" if below else _RANKS[owner[keys[0]]]}"'
    look += ' stroke="#cf5b5b" stroke-width="3"' if keys in sent else ""
    marks.append(f'<rect x="{x - 12}" y="{y - 10}" width="24" height="20" rx="4" {look}/>')
    name = "-".join(map(str, keys[:: len(keys) - 1 or 1]))
    marks.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle">{name}</text>')
    return x, y - 10


_RANKS = ("#79abe0", "#f0a04b", "#8fd0a5")


def pictures() -> dict[str, str]:
    """Return SVG by the name of its file."""
    found = {"same_bits.svg": trees()}
    for schedule in ALL:
        mask, shape = (pack(8, 2), PACK_SHAPE) if schedule in FOR_PACKS else (causal(TOKENS), SHAPE)
        name = schedule.layout if schedule.name == "owner_computes" else schedule.name
        found[f"{name}_p8.svg"] = draw(schedule.plan(mask, 8), "svg", phase="forward", sizes=shape)
    return found


PAGES = {
    "schedules": {"choices-8": partial(choices, 8)},
    "schedule-theory": {"costs-8": partial(costs, 8), "packs": packs},
}
