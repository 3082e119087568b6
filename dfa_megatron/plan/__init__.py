"""Who computes what, when, and what moves: plans of distributed attention as pure data, without PyTorch."""

from dfa_megatron.plan.cost.choose import candidates, explain, make_plan
from dfa_megatron.plan.cost.hardware import PROFILES, Hardware, Link
from dfa_megatron.plan.cost.profile import profile_named
from dfa_megatron.plan.cost.simulate import Timeline, bytes_received, bytes_sent, simulate
from dfa_megatron.plan.draw import draw
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan, Block, Plan
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.plan.language.text import from_text, to_text
from dfa_megatron.plan.proof.check import check_plan
from dfa_megatron.plan.schedules import SCHEDULES, with_blocks
from dfa_megatron.plan.schedules.load_balanced import layout_of

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PROFILES",
    "SCHEDULES",
    "AttentionPlan",
    "AttentionShape",
    "Block",
    "Hardware",
    "Link",
    "Plan",
    "Timeline",
    "bytes_received",
    "bytes_sent",
    "candidates",
    "check_plan",
    "draw",
    "explain",
    "from_text",
    "layout_of",
    "make_plan",
    "profile_named",
    "simulate",
    "to_text",
    "with_blocks",
]
