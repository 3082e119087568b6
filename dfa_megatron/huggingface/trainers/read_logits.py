"""Know whether a Trainer that evaluates reads logits, which it does not tell its model."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from dfa_megatron.hooks import replace

_READS: ContextVar[bool | None] = ContextVar("whether the Trainer that predicts reads logits", default=None)

_FOLLOWED = "_dfa_followed"
"""The attribute of the replaced method."""


def follow_trainers() -> None:
    """Let `Trainer.prediction_step` of transformers say what it reads; may be called again."""
    from transformers import Trainer

    own = Trainer.prediction_step
    if hasattr(own, _FOLLOWED):
        return

    @functools.wraps(own)
    def prediction_step(
        self: Any, model: Any, inputs: Any, prediction_loss_only: bool, *more: Any, **named: Any
    ) -> Any:
        token = _READS.set(not prediction_loss_only)
        try:
            return own(self, model, inputs, prediction_loss_only, *more, **named)
        finally:
            _READS.reset(token)

    setattr(prediction_step, _FOLLOWED, True)
    replace(Trainer, "prediction_step", prediction_step)


def reads_logits() -> bool | None:
    """Return whether the Trainer that predicts reads logits; None outside of its steps."""
    return _READS.get()
