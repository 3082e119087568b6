"""Shift tokens and labels for multi-token prediction over the ranks and documents of a distributed model's call."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.megatron.tokens.visit import current_visit
from dfa_megatron.sequence.roll import roll_sequence

_HOME = "megatron.core.transformer.multi_token_prediction"


def rolling(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """Make roll_tensor follow the ranks and documents of a distributed model's call; outside it is Megatron's."""

    def roll_tensor(
        tensor: Any,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Any:
        visit = current_visit()
        if visit is None or cp_group is None or tensor is None:
            return megatrons(tensor, shifts, dims, cp_group, packed_seq_params, **others)
        if others.keys() - {"return_sum"} or shifts != -1 or dims not in (-1, tensor.dim() - 1):
            raise UnsupportedError(
                f"roll_tensor with {', '.join(others) or (shifts, dims)}",
                "tokens move by one to the left, in the last dimension, and no other argument is known",
                "shifts=-1, dims=-1",
            )
        # Multimodal position_ids have three dimensions: they are whole, and prediction layers do not read them.
        where: Any = {"group": visit.group, "layout": visit.layout, "cu_seqlens": visit.offsets or None}
        rolled = tensor if tensor.dim() == 3 else roll_sequence(tensor, shifts, dim=-1, **where)
        return rolled, _of_group(rolled.sum(), visit.group) if others.get("return_sum", True) else None

    return roll_tensor


def _of_group(count: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean of a count over the ranks of a group; 1 for 0, by which Megatron-Core 0.16 would divide.

    Megatron divides a prediction's losses by the count of one rank, and the gradients by the ranks. Only the mean count
    makes of both the mean over all tokens.
    """
    if group.size() == 1:
        return count
    total = count.float()
    dist.all_reduce(total, group=group)
    return torch.where(total == 0, 1.0, total / group.size())


def counting(megatrons: Callable[..., Any]) -> Callable[..., Any]:
    """Make the loss of prediction layers the mean over all counted tokens of the ranks that share the sequence.

    Megatron does not divide by counts under 1, so the mean count of `_of_group` is not enough: here a token weighs as
    much as there are ranks, and that mean is the count of all of them. With calculate_per_token_loss Megatron
    multiplies by the tokens that one rank counts before the shift, which may be 0 where it counts some after it. In its
    place the factor of the loss has those of all ranks.
    """

    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(megatrons).bind(*args, **kwargs)
        bound.apply_defaults()
        given, visit = bound.arguments, current_visit()
        labels, mask = given["labels"], given["loss_mask"]
        if visit is None or visit.group.size() == 1 or (labels is None and given.get("input_ids") is None):
            return megatrons(*args, **kwargs)
        group = visit.group
        roll = functools.partial(vars(sys.modules[_HOME])["roll_tensor"], cp_group=group)
        tokens = given["input_ids"] if labels is None else labels
        mask = torch.ones_like(tokens, dtype=torch.float32) if mask is None else mask
        if labels is None:
            given["labels"], mask = roll(tokens)[0], roll(mask)[0]
        given["loss_mask"] = mask * group.size()
        if given["config"].calculate_per_token_loss:
            given["config"] = config = copy.copy(given["config"])
            config.calculate_per_token_loss = False
            before = mask.sum(dtype=torch.float32)
            dist.all_reduce(before, group=group)
            config.mtp_loss_scaling_factor = config.mtp_loss_scaling_factor * before / group.size()
        with for_a_while(visit, predicting=True):
            return megatrons(*bound.args, **bound.kwargs)

    return process_mtp_loss
