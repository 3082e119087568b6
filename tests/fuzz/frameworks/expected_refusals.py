"""Refusals that a draw may meet; any other one is a failure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Refusals = Sequence[tuple[str, str, Callable[[Any], Any]]]
"""Of each a name, "" for the message itself, a pattern of it, and a test that the draw must pass."""


def name_of(refusals: Refusals, draw: Any, text: str) -> str:
    """Return the name of a refusal, or "" for an unexpected one."""
    return next((name or text for name, pattern, fits in refusals if fits(draw) and re.search(pattern, text)), "")


def _degree(draw: Any) -> int:
    degree = draw.options["ulysses_degree"]
    return degree if isinstance(degree, int) else 1


MEGATRON: Refusals = (
    (
        "padding_mask that Megatron's own recomputation loses",
        "padding_mask beside experts with --recompute-method block",
        lambda d: d.padding_mask and d.options["checkpoint"] == "none",
    ),
    (
        "a degree that does not divide the heads", r"ulysses_degree=\d+ with \d+ heads",
        lambda d: (d.config["num_attention_heads"] // d.tp) % _degree(d),
    ),
    (
        "two head_dims on the cpu kernel", r"kernel='cpu' for .* needs head_dim",
        lambda d: d.options["kernel"] == "cpu" and d.config.get("v_head_dim", 12) != 12,
    ),
    (
        "offload without recomputation", "remat_offload without",
        lambda d: d.options["remat_offload"] and d.config.get("recompute_granularity") != "full",
    ),
    ("a schedule of causal work", "it pairs causal work only", lambda d: d.pack == "mask"),
    ("a loss of each row of a pack", "samples in a pack", lambda d: d.pack == "rows" and d.batch > 1),
)  # fmt: skip
LANGUAGE_MODELS: Refusals = (
    (
        "layers that transformers does not checkpoint", "transformers does not checkpoint its layers",
        lambda d: d.options["checkpoint"] != "none" and d.kind in ("ctrl", "jetmoe"),
    ),
    ("padding on the left", "padding that is not on the right", lambda d: d.data.padding == "left"),
    (
        "capped scores on the cpu kernel", r"kernel='cpu' for .* softcap",
        lambda d: d.options["kernel"] == "cpu" and d.model.get("attn_logit_softcapping"),
    ),
    (
        "a loss function that is not marked", "labels for the loss function",
        lambda d: getattr(d, "function", "") == "not" and d.loss != "function",
    ),
    ("a schedule of causal work", "it pairs causal work only", lambda d: d.data.pack == "mask"),
    ("", "", lambda d: getattr(d, "unlisted", False)),
)  # fmt: skip
