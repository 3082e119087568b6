"""The functions that recurrent layers of transformers call, over a sequence that is spread over ranks.

Each takes the function that it stands in for, the options of a recurrence, and that call's arguments by name. It runs
the function on this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dfa_megatron.recurrence import dist_conv, dist_mamba1, dist_mamba2, dist_scan, fla_scan
from dfa_megatron.runtime.cu_seqlens import Offsets

Keywords = dict[str, Any]
Real = Callable[..., Any]


def convolution(real: Real, options: Keywords, given: Keywords) -> torch.Tensor:
    """Compute a causal convolution of hidden_states (batch, channels, local_seq) with weight (channels, width)."""

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        out: torch.Tensor = real(**given | {"hidden_states": x})
        return out

    return dist_conv(run, given["hidden_states"], given["weight"].shape[-1], dim=2, **options)


def delta_rule(real: Real, options: Keywords, given: Keywords) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a delta rule whose states are (batch, heads, k_dim, v_dim): gated, or Kimi's with a gate per channel."""
    tokens = {name: given.pop(name) for name in ("query", "key", "value", "g", "beta")}
    return dist_scan(fla_scan(real, keys="key", values="value", packs=False, **given), tokens, **options)


def _state_space(scan: Callable[..., Any], real: Real, options: Keywords, given: Keywords) -> Any:
    """Compute the scan of Mamba-2, or the selective one of Mamba."""
    tokens = {"x": given.pop("hidden_states"), **{name: given.pop(name) for name in ("dt", "B", "C")}}
    out, state = scan(real, tokens, given.pop("A"), **given, **options)
    return (out, state) if given.get("return_final_states") or given.get("return_last_state") else out


STANDS_IN: dict[str, Callable[[Real, Keywords, Keywords], Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": partial(_state_space, dist_mamba2),
    "mamba_selective_scan": partial(_state_space, dist_mamba1),
}
"""What stands in for a function of transformers' modelling files, by its name there."""

FUSED = ("mamba2_split_conv1d_scan_combined",)
"""Functions that compute several of these at once, or return None where they cannot, as they do here."""

CLASSES = {
    (
        "causal_conv1d_fn",
    ): "InklingShortConvolution Inkling2ShortConvolution Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv",
    ("causal_conv1d_fn", "chunk_kimi_delta_attention"): "BailingHybridDeltaAttention KimiLinearDeltaAttention",
    ("causal_conv1d_fn", "mamba2_chunk_scan"): "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer "
    "NemotronHMamba2Mixer Zamba2MambaMixer",
    ("causal_conv1d_fn", "mamba_selective_scan"): "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer",
    ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"): "OlmoHybridGatedDeltaNet Qwen3_5GatedDeltaNet "
    "Qwen3_5MoeGatedDeltaNet Qwen3NextGatedDeltaNet",
}
"""The classes of layers with states, by the functions that each must call to be right."""
