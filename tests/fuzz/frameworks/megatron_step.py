"""Run a drawn step of Megatron-Core over its ranks, or on one rank of Megatron's own attention, in float64."""

from __future__ import annotations

from tests.frameworks import megatron_harness
from tests.frameworks.compare import Found
from tests.fuzz.frameworks.expected_refusals import MEGATRON as REFUSALS
from tests.fuzz.frameworks.megatron_draw import MegatronDraw, draw

__all__ = ["PRELOADED", "REFUSALS", "documented", "draw", "step"]

PRELOADED = (
    "megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.transformer.multi_latent_attention",
    "dfa_megatron.megatron.spec", "tests.fuzz.frameworks.megatron_step",
)  # fmt: skip


def documented(drawn: MegatronDraw) -> str:
    """Return what the pages say of a draw that Megatron-Core computes otherwise where packs have padding, or ""."""
    weighed = drawn.config.get("moe_aux_loss_coeff") or drawn.config.get("moe_z_loss_coeff")
    if weighed and drawn.pack == "padded" and "mtp_num_layers" in drawn.config:
        return "documented: padding counts in the losses of the experts of prediction layers"
    return ""


def step(drawn: MegatronDraw, rank: int, ranks: int) -> Found:
    """Return what this rank comes to."""
    return megatron_harness.step(drawn if ranks > 1 else drawn.alone())
