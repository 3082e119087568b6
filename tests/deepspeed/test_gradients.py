"""The loss, logits and gradients of one process at every ZeRO stage, for every mesh, packs, trees, masks, hybrids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed.harness import BUCKETS
from tests.fuzz.frameworks.deepspeed_step import DeepspeedDraw
from tests.fuzz.frameworks.steps import check, check_each
from tests.huggingface.rows import MODELS, row

STAGES = (0, 1, 2, 3)
HYBRIDS = dict.fromkeys(("bamba", "lfm2"), (3,)) | dict.fromkeys(("falcon_h1", "kimi_linear"), (0,))
HYBRIDS |= dict.fromkeys(("nemotron_h", "qwen3_next"), (0, 3))
"""Types with every recurrence, and their stages of ZeRO."""
LLAMA: Any = ("Llama", {})
SINKS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7}
TYPES = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
PRESCALED = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
UNEVEN = {"masks": ("a rank of prompt", "holes")}


def at(stage: int, shape: Any, size: int, **more: Any) -> Any:
    """Return a draw at a stage, of ZeRO 3 after a step in which its gathers have found their order."""
    more = {"checkpoint": "remat" if stage % 2 else "none", "loss": "own" if stage % 2 else "function", **more}
    more = {"warm": int(stage == 3), **more}
    return row(f"{shape[0]}, ZeRO {stage}", shape, size, 12 * size, DeepspeedDraw, stage=stage, **more)


@pytest.mark.support(
    "deepspeed", "ZeRO 0 to 3, gradients of one process; sequences over 1 to 4 ranks, the rest data parallel"
)
@pytest.mark.support("deepspeed", "attention sinks, ZeRO 0 and 3")
@pytest.mark.support("deepspeed", "packed documents")
@pytest.mark.support("deepspeed", "bfloat16")
@pytest.mark.support("deepspeed", "hybrids, rematerialized, at ZeRO 0 and 3")
def test_gradients_are_those_of_one_process_at_every_zero_stage() -> None:
    draws = [
        *(at(stage, LLAMA, 1, sequences=2, **UNEVEN) for stage in (1, 3)),
        *(at(stage, ("GptOss", SINKS), 2) for stage in (0, 3)),
        at(3, MODELS["gemma3-window-in-one-layer"], 2, pack="position_ids"),
        *(at(stage, LLAMA, 3, masks=("a rank of prompt",)) for stage in STAGES),
        *(at(stage, LLAMA, 3, pack="position_ids", loss="own") for stage in STAGES),
        *(at(stage, LLAMA, 2, sequences=2, **UNEVEN, zero=BUCKETS, more=TYPES) for stage in STAGES[1:]),
        at(0, LLAMA, 2, sequences=2, **UNEVEN, zero=BUCKETS, more=TYPES | PRESCALED),
        *(at(stage, LLAMA, 4) for stage in (2, 3)),
        *(at(stage, LLAMA, 2, more={"bf16": {"enabled": True}}) for stage in (1, 3)),
        *(at(3, MODELS["mistral-window"], 2, pack=pack, warm=0) for pack in ("tree", "mask")),
    ]
    some = {"pack": "position_ids", "checkpoint": "remat", "loss": "own", "warm": 0}
    draws += [at(stage, (kind, {}), 2, **some) for kind, stages in HYBRIDS.items() for stage in stages]
    check_each("deepspeed", draws)


@pytest.mark.parametrize("framework", ["transformers", "deepspeed"])
def test_random_steps_are_those_of_one_rank(framework: str) -> None:
    """`make fuzz-frameworks` draws more."""
    check(framework, 4)
