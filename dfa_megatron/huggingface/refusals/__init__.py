"""Every request that the integration with transformers refuses, in one table for each moment at which it looks."""

from dfa_megatron.huggingface.refusals.called_model import ATTENTION, INPUTS
from dfa_megatron.huggingface.refusals.cut_batch import BATCHES
from dfa_megatron.huggingface.refusals.distributed_trainer import ACCELERATOR, TRAINER
from dfa_megatron.huggingface.refusals.prepared_model import MODEL, SELFCHECK
from dfa_megatron.huggingface.refusals.proof_of_model import PROOF

STAGES = (MODEL, ACCELERATOR, TRAINER, BATCHES, INPUTS, ATTENTION, PROOF, SELFCHECK)

__all__ = ["ACCELERATOR", "ATTENTION", "BATCHES", "INPUTS", "MODEL", "PROOF", "SELFCHECK", "STAGES", "TRAINER"]
