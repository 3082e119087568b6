"""Prove a DeepSpeed engine: many ranks are compared with one, through the engine's own forward, backward and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.proof import ModelJob
from dfa_megatron.proving import Proof, examine

_COUNTERS = ("micro_step_id", "_epilogue_ran_this_backward")
"""What ZeRO's optimizers count within a step."""


def prove(engine: Any, *, tokens: int | None = None) -> Proof:
    """Compare the engine on its ranks with itself on each rank alone: see `dfa_megatron.huggingface.prove`.

    Gradients are compared as ZeRO reduces them, at every stage. Every rank must call this, between two steps.
    `"prove": true` in the block does it when the engine is made.

    Raises:
        ProofError: something differs; the first layer, rank and token are named.
        UnsupportedError: the engine has no block, is a pipeline or has a model of your own, or is within a step.
    """
    return examine(EngineJob(engine), tokens)


class EngineJob(ModelJob):
    """An engine around a transformers model."""

    def __init__(self, engine: Any) -> None:
        accumulated = engine.gradient_accumulation_steps()
        within = engine.micro_steps % accumulated
        if within:
            raise UnsupportedError(
                f"prove after {within} of a step's {accumulated} micro-batches",
                "ZeRO holds their gradients, which it would add to those of the proof",
                "prove before the first step, or between two",
            )
        super().__init__(engine)
        self.engine, self.sums, self.device = engine, False, engine.device
        self.title += f", ZeRO {engine.zero_optimization_stage()}"

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of the module inside."""
        return ((name, x) for name, x in self.engine.module.named_parameters() if x.requires_grad)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole gradients, as ZeRO reduced them; a collective call."""
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self.parameters():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            gradient = safe_get_full_grad(parameter)
            yield name, torch.zeros(shape) if gradient is None else gradient.view(shape)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward as that of a step's last micro-batch, which reduces gradients."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def clear(self) -> None:
        """Drop gradients, also those that ZeRO took."""
        self.engine.zero_grad()
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            held = getattr(optimizer, name, {})
            held.update(dict.fromkeys(held))
        for name in _COUNTERS:
            if name in self.counted:
                setattr(optimizer, name, self.counted[name])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Count as before."""
        optimizer, boundary = self.engine.optimizer, self.engine._is_gradient_accumulation_boundary
        self.counted = {name: vars(optimizer)[name] for name in _COUNTERS if name in vars(optimizer)}
        self.engine.set_gradient_accumulation_boundary(True)
        try:
            yield
        finally:
            self.engine._is_gradient_accumulation_boundary = boundary
