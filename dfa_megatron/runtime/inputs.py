"""The tensors of one call, and refusals of those that fit no attention."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from dfa_megatron.errors import UnsupportedError

_most_heads = [255]
"""Of fewer tokens: more heads than models have are tokens."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """The tensors of one call.

    q (batch, rows, heads, head_dim), k and v with kv_heads, v with head_dim_v; sinks (heads,).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


def transformed() -> UnsupportedError:
    """Return the error for tensors of torch.func, which have no memory of their own."""
    return UnsupportedError(
        "attention under a transform of torch.func, or with is_grads_batched",
        "kernels and messages take tensors that lie in memory",
        "backward, or torch.autograd.grad for each gradient",
    )


def refuse_strangers(*qkv: object) -> None:
    """Refuse what is no tensor at all.

    Raises:
        UnsupportedError: names it.
    """
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{name} of type {type(x).__name__}", "it is no tensor", "torch.as_tensor")
        if hasattr(x, "to_local"):  # a DTensor
            why = "each rank passes its own part as a plain tensor, and the functions send what is needed"
            raise UnsupportedError(f"{name} of type {type(x).__name__}", why, f"{name}.to_local(), sharded by tokens")


def allow_more_heads_than_tokens() -> None:
    """Take tensors of 256 heads and more on fewer tokens a rank, for the rest of this process; on every rank.

    Without it they are refused: heads before tokens, in PyTorch's order, look so.
    """
    _most_heads[0] = sys.maxsize


def refuse_tensors(inputs: Inputs) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        UnsupportedError: says which shapes, dtypes or devices, and what would fit.
    """
    q, k, v, *_ = inputs
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(shapes, "each must have 4 dimensions", "(batch, local_seq, heads, head_dim)")
    if not (q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise UnsupportedError(
            shapes,
            "they do not fit together",
            "one batch for all, one local_seq and kv_heads for k and v, one head_dim for q and k",
        )
    if any(0 in (x.shape[0], *x.shape[2:]) for x in (q, k, v)):
        raise UnsupportedError(shapes, "only tokens may lack on a rank", "at least one sequence, head and channel")
    if q.shape[2] > max(q.shape[1], _most_heads[0]):
        why = "these are more heads than tokens, as if heads came before tokens, in PyTorch's order"
        instead = "(batch, local_seq, heads, head_dim): x.transpose(1, 2); else allow_more_heads_than_tokens()"
        raise UnsupportedError(shapes, why, instead)
    if q.shape[2] % k.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} heads with {k.shape[2]} kv_heads",
            "heads must be a multiple of kv_heads",
            "for example equal counts",
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise UnsupportedError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype}",
            "all three must be one floating-point dtype",
            ", ".join(map(str, DTYPES)),
        )
    if q.device.type not in ("cpu", "cuda"):
        what, why = f"attention of tensors on {q.device}", "no kernel computes and no transport sends there"
        raise UnsupportedError(what, why, "tensors on a GPU, or on a CPU")
    if not q.device == k.device == v.device:
        raise UnsupportedError(
            f"devices {q.device}, {k.device}, {v.device}", "all three must be on one device", str(q.device)
        )
