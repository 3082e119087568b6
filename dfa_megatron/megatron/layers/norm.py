"""PyTorch's norms for sequence parallelism, where neither Transformer Engine nor Apex is installed."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError


class SequenceParallelNorm:
    """LayerNorm or RMSNorm whose weights are marked, so that Megatron sums their gradients over tensor-parallel ranks.

    Megatron's own WrappedTorchNorm has no such mark and refuses sequence parallelism
    (megatron/core/transformer/torch_norm.py). Each rank normalises its own rows, so nothing else changes. This is a
    class because Megatron's build_module passes a function on instead of calling it.

    Raises:
        UnsupportedError: a norm that PyTorch does not have in this form.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Return the norm; its weights are (hidden_size,)."""
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds or getattr(config, "layernorm_zero_centered_gamma", False):
            raise UnsupportedError(
                f"normalization={config.normalization!r} with sequence parallelism",
                "without Transformer Engine or Apex only plain LayerNorm and RMSNorm are done",
                "LayerNorm, RMSNorm, or an installation with Transformer Engine",
            )
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
