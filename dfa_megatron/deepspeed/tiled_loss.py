"""The rule for the loss without the logits of all tokens at once: a tile of tokens after the other."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from dfa_megatron.huggingface.loss import mean_of_sequences, summed_loss
from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.runtime.comm.groups import Group


def tiled_loss(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    shift_labels: torch.Tensor,
    *,
    group: Group = None,
    tiles: int = 8,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """`loss(head(hidden), shift_labels)`, a tile of tokens after the other; the head runs again in the backward.

    Every tile is a checkpoint of PyTorch's, so that autograd adds up the gradients of a weight, those of the embeddings
    among them where they share it, before ZeRO sees the sum. DeepSpeed's `SequenceTiledCompute` runs backwards inside
    the backward and lets ZeRO 2 and 3 reduce after the last of them, too early for a shared weight; its
    `TiledFusedLogitsLoss` leaves what multiplies the loss out of the head's gradient, gradient accumulation among it.

    Args:
        head: from hidden states to logits, called once per tile in the forward and once in the backward.
        hidden: (batch, local_seq, hidden size).
        shift_labels: (batch, local_seq), the label of the next token, ignore_index where there is none.
        group: the ranks that share the sequence.
        tiles: pieces that the tokens are cut into; logits take 1/tiles of their memory.
    """

    def of_tile(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(head(hidden), labels, ignore_index)

    cut = zip(hidden.tensor_split(tiles, dim=1), shift_labels.tensor_split(tiles, dim=1), strict=True)
    total = torch.stack([checkpoint(of_tile, *tile, use_reentrant=False) for tile in cut]).sum()
    return mean_of_sequences(total, shift_labels, group, ignore_index)
