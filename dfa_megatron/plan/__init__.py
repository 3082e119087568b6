"""Who computes what, when, and what moves: plans of distributed attention as pure data, without PyTorch."""

from dfa_megatron.plan.check import check_plan
from dfa_megatron.plan.choose import make_plan
from dfa_megatron.plan.cost import AttentionShape, Timeline, bytes_received, bytes_sent, simulate
from dfa_megatron.plan.draw import draw
from dfa_megatron.plan.hardware import PROFILES, Hardware
from dfa_megatron.plan.ir import BACKWARD, FORWARD, Plan, from_text, to_text
from dfa_megatron.plan.mask import (
    Mask,
    block_causal_documents,
    causal,
    causal_blockwise,
    documents,
    full,
    global_sliding,
    prefix_lm,
    prefix_lm_documents,
    shared_question,
    sliding_window,
    union,
)
from dfa_megatron.plan.schedules import SCHEDULES, AttentionPlan

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PROFILES",
    "SCHEDULES",
    "AttentionPlan",
    "AttentionShape",
    "Hardware",
    "Mask",
    "Plan",
    "Timeline",
    "block_causal_documents",
    "bytes_received",
    "bytes_sent",
    "causal",
    "causal_blockwise",
    "check_plan",
    "documents",
    "draw",
    "from_text",
    "full",
    "global_sliding",
    "make_plan",
    "prefix_lm",
    "prefix_lm_documents",
    "shared_question",
    "simulate",
    "sliding_window",
    "to_text",
    "union",
]
