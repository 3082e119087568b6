"""Draw plans: the grid as text, or a picture of the simulated run as SVG."""

from __future__ import annotations

from typing import Literal

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware
from dfa_megatron.plan.cost.simulate import simulate
from dfa_megatron.plan.draw.svg import picture
from dfa_megatron.plan.language.grid import grid
from dfa_megatron.plan.language.ir import PHASES, AttentionPlan, Plan
from dfa_megatron.plan.language.shape import AttentionShape

Style = Literal["text", "svg"]


def draw(
    plan: AttentionPlan | Plan,
    style: Style = "text",
    *,
    phase: Literal["forward", "backward", "both"] = "both",
    shape: AttentionShape | None = None,
    hardware: Hardware = H200_NVLINK,
    width: int = 100,
) -> str:
    """Draw a plan.

    Args:
        plan: both phases, or one.
        style: "text" is a row per step and a column per rank; "svg" a row per rank over simulated time.
        phase: which phases of an AttentionPlan.
        shape, hardware: what "svg" simulates.
        width: of the text, in characters; more ranks than fit merge into bands.

    Raises:
        UnsupportedError: an unknown style or phase.
        PlanError: "svg" of a plan that breaks a rule of the language.
    """
    if phase not in ("both", *PHASES):
        raise UnsupportedError(f"phase {phase!r}", "there is no such phase", "one of both, " + ", ".join(PHASES))
    phases = [one for one in plan.phases if isinstance(plan, Plan) or phase in ("both", one.phase.name)]
    if style == "text":
        return "\n\n".join(grid(one, width=width) for one in phases)
    if style != "svg":
        raise UnsupportedError(f"style {style!r}", "there is no such style", "one of text, svg")
    shape = shape or AttentionShape()
    name = f"{plan.schedule} schedule, " if isinstance(plan, AttentionPlan) else ""
    mask = phases[0].mask
    title = f"{name}{mask.name} mask, {mask.length:,} tokens, {plan.ranks} ranks"
    timelines = [(one, simulate(one, shape, hardware)) for one in phases]
    heads = f"{shape.heads} heads, {shape.kv_heads} kv heads of {shape.head_dim}"
    return picture(title, f"{heads}, {hardware.name}", timelines)
