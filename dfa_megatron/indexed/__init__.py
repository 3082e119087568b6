"""Learned-sparse attention over a sharded sequence: an indexer chooses the keys of each query, and is trained.

The rule of choice: the highest score first, among equal scores the lowest global position. ReLU makes many scores
exactly zero, so equal scores are common.

index_topk    the positions that an indexer chooses
sparse_attn   attention over chosen positions
index_loss    the indexer's loss: its softmax compared with attention's own probabilities
"""

from dfa_megatron.indexed.chosen import sparse_attn
from dfa_megatron.indexed.index_loss import index_loss
from dfa_megatron.indexed.topk import index_topk

__all__ = ["index_loss", "index_topk", "sparse_attn"]
