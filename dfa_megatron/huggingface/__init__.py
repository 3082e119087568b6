"""Distributed attention for Hugging Face models: the attention implementation `dfa`, and the loss.

from dfa_megatron import huggingface as dfa_hf

dfa_hf.distribute_attention(model, group=group, config=TrainingConfig(checkpoint="remat"))
model(input_ids=ids, labels=ids).loss.backward()   # whole batches; then average gradients over all ranks

dfa_hf.prove(model)                         # the ranks compared with one, before training: less than a minute

dfa_hf.distribute_trainer(trainer, size=8)  # or let HF Trainer, TRL's SFTTrainer and the like do it all
dfa_hf.distribute_accelerator(accelerator, model, size=8)   # or a loop around accelerate
dfa_hf.add_cp_backend()                     # or ParallelismConfig(cp_size=8, cp_backend="dfa") says so for both
"""

from dfa_megatron.huggingface.accelerator import distribute_accelerator
from dfa_megatron.huggingface.cp_backend import add_cp_backend
from dfa_megatron.huggingface.current_forward import NAME
from dfa_megatron.huggingface.distribute import distribute_attention, indexer_loss, local_attention, train_indexers
from dfa_megatron.huggingface.loss import causal_lm_loss, sums_tokens
from dfa_megatron.huggingface.proof import prove
from dfa_megatron.huggingface.trainer import distribute_trainer

__all__ = [
    "NAME",
    "add_cp_backend",
    "causal_lm_loss",
    "distribute_accelerator",
    "distribute_attention",
    "distribute_trainer",
    "indexer_loss",
    "local_attention",
    "prove",
    "sums_tokens",
    "train_indexers",
]
