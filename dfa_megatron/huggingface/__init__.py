"""Distributed attention for Hugging Face models: the attention implementation `dfa`, batches and the loss.

from dfa_megatron import huggingface as dfa_hf

dfa_hf.distribute_attention(model, group=group, config=DistAttentionConfig(checkpoint="remat"))
batch = dfa_hf.shard_batch({"input_ids": ids, "labels": ids}, group=group)
model(**batch).loss.backward()              # then average the gradients over all ranks
"""

from dfa_megatron.huggingface.attention_function import NAME
from dfa_megatron.huggingface.batch import shard_batch
from dfa_megatron.huggingface.distribute import distribute_attention, local_attention
from dfa_megatron.huggingface.loss import causal_lm_loss

__all__ = ["NAME", "causal_lm_loss", "distribute_attention", "local_attention", "shard_batch"]
