"""The loss by which transformers' models balance their experts (output_router_logits), over all ranks of a sequence.

It is a product of sums over tokens, so the mean of the ranks' own losses would be another. The ranks add up these sums.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import replace
from dfa_megatron.huggingface.current_forward import Forward, innermost
from dfa_megatron.sharding import unshard_sequence

_NAME = "load_balancing_loss_func"
"""The function in a model's file, the same in all of them; and the attribute that marks what stands in for it."""


def follow_router(forward: Callable[..., Any]) -> None:
    """Let the loss of routers in the file of a model's forward count the tokens of all ranks; may be called again."""
    if (real := _own(forward)) is None:
        return

    @functools.wraps(real)
    def loss(gate_logits: Any, num_experts: int | None = None, top_k: int = 2, *masks: Any, **more: Any) -> Any:
        call = innermost()
        if call is None or not call[1].distributed or not isinstance(gate_logits, tuple) or num_experts is None:
            return real(gate_logits, num_experts, top_k, *masks, **more)
        return _balance(call[1], gate_logits, num_experts, top_k)

    setattr(loss, _NAME, real)
    replace(sys.modules[inspect.unwrap(forward).__module__], _NAME, loss)


def _own(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return that function in the file of a model's forward; None where it is ours, or there is none."""
    found: Callable[..., Any] | None = vars(sys.modules[inspect.unwrap(forward).__module__]).get(_NAME)
    return None if hasattr(found, _NAME) else found


def check_router(model: Any) -> None:
    """Refuse a model whose loss of routers would count the tokens of this rank alone: the name was put back."""
    if _own(type(model).forward) is not None:
        name = type(model).__name__
        raise UnsupportedError(
            f"a {name} whose router's loss did not reach ours", "its name was put back", "distribute_attention again"
        )


def _balance(forward: Forward, gate_logits: tuple[torch.Tensor, ...], experts: int, top_k: int) -> torch.Tensor:
    """Return the loss of Switch Transformer's equations 4 to 6 as transformers computes it, of the whole sequences.

    Args:
        gate_logits: of every layer (batch x local_seq, experts).
    """
    device = gate_logits[0].device
    counted = torch.ones(len(gate_logits[0]), device=device)
    if forward.mask is not None:  # 0 for padding
        counted = forward.mask.to(device, torch.float32).flatten()
    counts, chances = torch.zeros(2, experts, device=device)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices
        counts = counts.scatter_add(0, chosen.flatten(), counted.repeat_interleave(top_k))
        chances = chances + (weights.float() * counted[:, None]).sum(0)
    sums = torch.cat((counts, chances, counted.sum()[None] * len(gate_logits)))
    if forward.context.group:  # gradients are summed over the ranks too: every loss depends on the tokens of all
        sums = unshard_sequence(sums[None], group=forward.context.group, dim=0).sum(0)
    counts, chances, rows = sums.split((experts, experts, 1))
    balance: torch.Tensor = (counts / rows * (chances / rows)).sum() * experts
    return balance
