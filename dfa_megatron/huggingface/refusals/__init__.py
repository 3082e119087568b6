"""Every request that the integration with transformers refuses, in one table for each moment at which it looks."""

from dfa_megatron.huggingface.refusals.called_model import ATTENTION, INPUTS
from dfa_megatron.huggingface.refusals.cut_batch import BATCHES
from dfa_megatron.huggingface.refusals.distributed_trainer import ACCELERATOR, TRAINER
from dfa_megatron.huggingface.refusals.prepared_model import MODEL, SELFCHECK

STAGES = (MODEL, ACCELERATOR, TRAINER, BATCHES, INPUTS, ATTENTION, SELFCHECK)

__all__ = ["ACCELERATOR", "ATTENTION", "BATCHES", "INPUTS", "MODEL", "SELFCHECK", "STAGES", "TRAINER"]
