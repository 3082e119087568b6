"""Every request that the integration with transformers refuses, in one table for each moment at which it looks."""

from dfa_megatron.huggingface.refusals.calls import ATTENTION, BATCHES, INPUTS
from dfa_megatron.huggingface.refusals.model import MODEL, SELFCHECK

STAGES = (MODEL, BATCHES, INPUTS, ATTENTION, SELFCHECK)

__all__ = ["ATTENTION", "BATCHES", "INPUTS", "MODEL", "SELFCHECK", "STAGES"]
