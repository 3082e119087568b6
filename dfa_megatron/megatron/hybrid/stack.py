"""Hybrid stacks (Mamba, MLP, experts and attention in one stack): the spec, and the exchange at their ends.

In layout `boundary` hidden states are exchanged before the first layer of a stack and after its last, as in a GPT. So
every layer inside sees tokens in order. Prediction layers are stacks of the same layers, with an exchange of their own.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from dfa_megatron.megatron.layers.context import CONTEXT, AttentionContext
from dfa_megatron.megatron.layers.sharing import SharingLayer
from dfa_megatron.megatron.refusals import CALLS, SPEC

_MARK = "_dfa_megatron"


class ExchangingStack(SharingLayer):
    """Exchange hidden states around a stack's layers; the first base of every class that `_stack_class` makes."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the stack's own forward, with the same result."""
        stack: Any = self
        run = super().forward  # type: ignore[misc]
        if not self._dfa_exchanges:
            return run(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        given = inspect.signature(run).bind(hidden_states, *args, **kwargs).arguments
        CALLS.check(inference_context=given.get("inference_context") is not None)
        self._dfa_placed(given.get("packed_seq_params"), hidden_states if stack.pre_process else stack.input_tensor)
        exchange, order = self._dfa_exchange(), self._dfa_order
        if stack.pre_process:
            hidden_states = exchange(hidden_states, order, "contiguous")
        hidden_states = run(hidden_states, *args, **kwargs)
        return exchange(hidden_states, "contiguous", order) if stack.post_process else hidden_states


@functools.cache
def _stack_class(base: type) -> type:
    return type(f"Exchanging{base.__name__}", (ExchangingStack, base), {"__module__": __name__})


def is_stack(spec: Any) -> bool:
    """Return whether a spec is for a HybridStack (called MambaStack up to Megatron-Core 0.17)."""
    submodules = getattr(spec, "submodules", None)
    return hasattr(submodules, "attention_layer") and hasattr(submodules, "mamba_layer")


def follow_stack(spec: Any, context: AttentionContext) -> None:
    """Make every stack that is built with a spec's submodules exchange hidden states.

    Megatron builds the stacks of prediction layers itself, from the submodules alone. So this function replaces the
    constructor of its class of stacks, once per process; stacks of other submodules stay as they are.

    Raises:
        UnsupportedError: the spec's module is not that class.
    """
    megatrons = megatrons_stack()
    SPEC.check(other_stack=None if issubclass(spec.module, megatrons) else spec.module.__name__)
    setattr(spec.submodules, CONTEXT, context)
    built = megatrons.__init__
    if hasattr(built, _MARK):
        return

    @functools.wraps(built)
    def joined(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        given = inspect.signature(built).bind(self, *args, **kwargs).arguments
        context = getattr(given["submodules"], CONTEXT, None)
        if context is not None:
            base: Any = type(self)
            self.__class__ = _stack_class(base)
            self._dfa_join(context, given["pg_collection"])

    setattr(joined, _MARK, built)
    megatrons.__init__ = joined


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
        SPEC.check(stack_error=error)
    return spec
