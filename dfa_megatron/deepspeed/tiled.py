"""The rule for the loss without the logits of all tokens at once, by DeepSpeed's tiled compute."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.runtime.groups import Group, group_name, group_size, resolve


def tiled_loss(
    head: torch.nn.Module,
    hidden: torch.Tensor,
    shift_labels: torch.Tensor,
    *,
    group: Group = None,
    tiles: int = 8,
    ignore_index: int = IGNORED,
    tied: bool = False,
) -> torch.Tensor:
    """`loss(head(hidden), shift_labels)`, a tile of tokens after the other; the head runs again in the backward.

    DeepSpeed's `TiledFusedLogitsLoss`, which runs its backward at once, leaves what multiplies the loss out of the
    head's gradient, gradient accumulation among it; its `SequenceTiledCompute`, which this uses, does not.

    Args:
        head: from hidden states to logits, called once per tile in the forward and once in the backward.
        hidden: (batch, local_seq, hidden size).
        shift_labels: (batch, local_seq), the label of the next token, ignore_index where there is none.
        group: the ranks that share the sequence.
        tiles: pieces that the tokens are cut into; logits take 1/tiles of their memory.
        tied: the head's weight is that of the embeddings as well (`tie_word_embeddings`). At ZeRO 2 and 3 it must be
            said: DeepSpeed would take the weight's gradient for complete before that of the embeddings is in it.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    name = group_name(group)
    count = (shift_labels != ignore_index).sum()
    if name:
        dist.all_reduce(count, group=resolve(name))

    def summed(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = head(hidden).flatten(0, -2)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return torch.nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=ignore_index, reduction="sum")

    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    total: torch.Tensor = sequence_tiled_compute(
        summed,
        hidden.shape[1],
        tiles,
        kwargs_to_shard={"hidden": hidden, "labels": shift_labels},
        kwargs_to_pass={},
        grad_requiring_tensor_key="hidden",
        compute_params=[] if tied else parameters,
        output_unshard_dimension=0,
        output_reduction="sum",
    )
    if tied and total.requires_grad:
        total.register_hook(lambda gradient: _mark(parameters, ready=False))
        hidden.register_hook(lambda gradient: _mark(parameters, ready=True))  # what follows is the embeddings' own
    return total * group_size(name) / count.clamp(min=1)


def _mark(parameters: list[torch.nn.Parameter], *, ready: bool) -> None:
    """Whether ZeRO may reduce the gradients of these when one has been added to them."""
    for parameter in parameters:
        parameter.ds_grad_is_ready = ready  # type: ignore[attr-defined]
