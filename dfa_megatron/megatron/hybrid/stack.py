"""The specs of hybrid stacks: Mamba, MLP, experts and attention in one stack."""

from __future__ import annotations

from typing import Any

from dfa_megatron.errors import UnsupportedError


def is_stack(spec: Any) -> bool:
    """Return whether a spec is for a HybridStack (called MambaStack up to Megatron-Core 0.17)."""
    submodules = getattr(spec, "submodules", None)
    return hasattr(submodules, "attention_layer") and hasattr(submodules, "mamba_layer")


def megatrons_stack() -> Any:
    """Return Megatron's class of hybrid stacks (called MambaStack up to Megatron-Core 0.17)."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack
    except ModuleNotFoundError:
        from megatron.core.ssm.mamba_block import MambaStack

        return MambaStack
    return HybridStack


def default_stack_spec() -> Any:
    """Return Megatron's own hybrid_stack_spec (called mamba_stack_spec up to 0.17).

    Raises:
        UnsupportedError: the spec needs a package that is not installed (Transformer Engine, mamba-ssm, Triton).
    """
    try:
        try:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("megatron"):
                raise
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    except ImportError as error:
        raise UnsupportedError(
            "Megatron's hybrid stack spec",
            f"it cannot be imported: {error}",
            "an installation with Transformer Engine, or distribute_attention of a stack spec of your own",
        ) from error
    return spec
