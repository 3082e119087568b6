"""Faults that a rank process is given before it builds the model; each breaks one thing as a real mistake would."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.support.plants import vars_of


def _calls_with(**changed: Any) -> None:
    """Every distributed attention is called with other arguments."""
    from dfa_megatron.huggingface import attention_function as attention

    real = attention.dist_flash_attn_func

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, **changed})

    vars(attention)["dist_flash_attn_func"] = wrong


def _batches_with(change: Any) -> None:
    """Every rank's part of a batch is changed."""
    from dfa_megatron import deepspeed, huggingface

    real = huggingface.shard_batch

    def wrong(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        return {**batch, **change(batch)}

    for module in (huggingface, deepspeed):
        vars(module)["shard_batch"] = wrong


def the_mask_is_dropped() -> None:
    _calls_with(causal=False, window_size=(-1, -1))


def the_window_is_dropped() -> None:
    _calls_with(window_size=(-1, -1))


def one_rank_has_another_plan() -> None:
    from dfa_megatron.config import DistAttentionConfig

    if dist.get_rank() == 1:
        _calls_with(config=DistAttentionConfig(schedule="ring"))


def rope_has_no_offset() -> None:
    """Every rank rotates by the positions of the first tokens."""
    from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding

    real = MistralRotaryEmbedding.forward

    def wrong(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return real(self, x, position_ids - position_ids.min())

    vars_of(MistralRotaryEmbedding, "forward", wrong)


def labels_are_shifted_inside_chunks() -> None:
    """As a loader does that makes labels of tokens it has cut already."""

    def change(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = torch.where(batch["labels"] == -100, -100, batch["input_ids"].roll(-1, 1))
        return {"labels": labels, "shift_labels": labels}

    _batches_with(change)


def the_loss_is_scaled_by_the_ranks() -> None:
    _batches_with(lambda batch: {"num_items_in_batch": batch["num_items_in_batch"] / dist.get_world_size()})


def the_optimizer_steps_on_unreduced_gradients() -> None:
    """In the run with the optimizer only: gradients stay each rank's own."""
    from torch.nn.parallel import DistributedDataParallel

    real_optimizer, real_forward = torch.optim.AdamW.__init__, DistributedDataParallel.forward
    steps = []

    def with_optimizer(*args: Any, **kwargs: Any) -> None:
        steps.append(True)
        real_optimizer(*args, **kwargs)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not steps:
            return real_forward(self, *args, **kwargs)
        with self.no_sync():
            return real_forward(self, *args, **kwargs)

    vars_of(torch.optim.AdamW, "__init__", with_optimizer)
    vars_of(DistributedDataParallel, "forward", wrong)
