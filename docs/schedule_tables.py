"""The tables of schedules.md and schedule-theory.md, and their pictures, computed by the planner."""

from __future__ import annotations

import random
from functools import partial

from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.cost.hardware import H200_NVLINK, H200_SLOW_LINK, IDEAL_LINK
from dfa_megatron.plan.cost.simulate import bytes_sent, simulate
from dfa_megatron.plan.draw import draw
from dfa_megatron.plan.language.ir import AttentionPlan, Plan, loads
from dfa_megatron.plan.language.mask import Mask, causal, documents
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules import ALL, OWNER_COMPUTES, SCHEDULES, Schedule

TOKENS = 65536
SHAPE = AttentionShape(kv_heads=8)
PACK_SHAPE = AttentionShape(heads=64, kv_heads=8)
FOR_PACKS = (OWNER_COMPUTES["load_balanced"], SCHEDULES["greedy"])


def label(schedule: Schedule | AttentionPlan) -> str:
    """What the tables call a schedule."""
    name = schedule.name if isinstance(schedule, Schedule) else schedule.schedule
    return f"`{name}`" + (f" on {schedule.layout}" if schedule.layout != "contiguous" else "")


def costs(ranks: int) -> list[str]:
    """What each schedule costs on one machine."""
    rows = [
        "| schedule | steps | kernel calls per rank | idle, arithmetic alone | idle on H200s, forward / backward "
        "| MB sent, mean (most), forward | backward | slots, forward / backward |",
        "|---|---|---|---|---|---|---|---|",
    ]
    tokens = TOKENS // (2 * ranks) * 2 * ranks
    for schedule in ALL:
        if schedule in FOR_PACKS:
            continue
        plan = schedule.plan(causal(tokens), ranks)
        programs = [lower_all(phase) for phase in (plan.forward, plan.backward)]
        calls = max(sum(len(step.calls) for step in program.steps) for program in programs[0])
        slots = " / ".join(str(max(len(program.slots) for program in phase)) for phase in programs)
        ideal = simulate(plan.forward, SHAPE, IDEAL_LINK).idle_share
        real = " / ".join(
            f"{100 * simulate(phase, SHAPE, H200_NVLINK).idle_share:.1f} %" for phase in (plan.forward, plan.backward)
        )
        steps = 1 + max(block.step for block in plan.forward.blocks)
        rows.append(
            f"| {label(schedule)} | {steps} | {calls} | {100 * ideal:.1f} % | {real} "
            f"| {_sent(plan.forward)} | {_sent(plan.backward)} | {slots} |"
        )
    return rows


def _sent(phase: Plan) -> str:
    sent = bytes_sent(phase, SHAPE)
    return f"{sum(sent) / len(sent) / 1e6:.0f} ({max(sent) / 1e6:.0f})"


def choices(ranks: int) -> list[str]:
    """What `auto` takes."""
    rows = ["| machine | tokens | kv heads | contiguous tokens | any layout |", "|---|---|---|---|---|"]
    for hardware in (H200_NVLINK, H200_SLOW_LINK):
        taken = list[tuple[str, str]]()
        for tokens in (16384, 65536, 262144):
            for kv_heads in (32, 8):
                shape = AttentionShape(kv_heads=kv_heads)
                plans = (
                    make_plan(causal(tokens), ranks, layout=layout, shape=shape, hardware=hardware)
                    for layout in ("contiguous", "auto")
                )
                first, second = (label(plan) for plan in plans)
                taken.append((f"{tokens // 1024}K | {kv_heads}", f"{first} | {second}"))
        if len({choice for _, choice in taken}) == 1:
            taken = [("any of these | any", taken[0][1])]
        rows += [f"| {hardware.name} | {case} | {choice} |" for case, choice in taken]
    return rows


def pack(ranks: int, seed: int) -> Mask:
    """8K tokens per rank of causal documents: lengths log-normal around 2,000, none above a quarter of the pack."""
    rng, lengths, left = random.Random(seed), list[int](), 8192 * ranks
    while left:
        lengths.append(min(max(1, round(2000 * rng.lognormvariate(0.0, 1.2))), 2048 * ranks, left))
        left -= lengths[-1]
    return documents(lengths)


def packs() -> list[str]:
    """What each schedule makes of packed documents."""
    rows = [
        "| ranks | pack | schedule | work, most over mean | MB sent, mean (most) | ms |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, seed in ((4, 0), (16, 2)):
        mask = pack(ranks, seed)
        for schedule in (SCHEDULES["balanced"], *FOR_PACKS[::-1]):
            plan = schedule.plan(mask, ranks)
            load, sent = loads(plan.forward.blocks, mask, plan.forward.layout), bytes_sent(plan, PACK_SHAPE)
            seconds = simulate(plan, PACK_SHAPE, H200_NVLINK).makespan
            rows.append(
                f"| {ranks} | {len(mask.tiles)} documents | {label(schedule)} | {max(load) * ranks / sum(load):.2f} "
                f"| {sum(sent) / len(sent) / 1e6:.0f} ({max(sent) / 1e6:.0f}) | {1e3 * seconds:.1f} |"
            )
    return rows


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        f"{schedule.layout if schedule.name == 'owner_computes' else schedule.name}_p8.svg": draw(
            schedule.plan(pack(8, 2) if schedule in FOR_PACKS else causal(TOKENS), 8),
            "svg",
            phase="forward",
            shape=PACK_SHAPE if schedule in FOR_PACKS else SHAPE,
        )
        for schedule in ALL
    }


TABLES = {"costs-8": partial(costs, 8), "choices-8": partial(choices, 8), "packs": packs}
