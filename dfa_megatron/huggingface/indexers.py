"""Layers whose keys an indexer chooses: the choice is over the ranks, and attention reads latents where they lie.

An indexer's own forward runs. It is handed a key cache, and what that returns stands for the keys of all ranks:

    indexer.forward                   q, k and weights as transformers computes them
      cache.update_indexer(k)         returns `Indexed`
      matmul, relu, matmul, mask      it follows what is asked
      topk(...).indices               `index_topk`

A layer would make keys and values of all heads from latents. It gets the latents: what `kv_b_proj` does to them goes to
the queries and the output instead.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any, Self

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import TESTED, surround
from dfa_megatron.huggingface.current_forward import (
    CONTEXT,
    MUST_REACH,
    Arguments,
    Forward,
    forward_of_context,
    in_layer,
    reach,
)
from dfa_megatron.huggingface.loss import as_whole
from dfa_megatron.huggingface.seen import Seen, mask_of
from dfa_megatron.indexed import index_loss, index_topk, sparse_attn
from dfa_megatron.remat import active_frame

INDEXER = "update_indexer"
"""What an indexer must call, by the lists of check_model.py."""


@dataclass(slots=True, eq=False)
class Indexed:
    """Stand for the keys of all ranks, then for products of queries with them, then for scores.

    Args:
        keys: (batch, local_seq, dim), of this rank.
        length: tokens of a row.
        run: chooses, given queries (batch, local_seq, heads, dim), keys, weights (batch, local_seq, heads), a number.
    """

    keys: torch.Tensor
    length: int
    run: Any
    queries: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    scale: Any = 1.0
    clamped: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return that of scores."""
        return (*self.keys.shape[:2], self.length)

    def float(self) -> Self:
        """Cast the keys."""
        self.keys = self.keys.float()
        return self

    def _itself(self, *_: Any) -> Self:
        return self

    transpose = unsqueeze = squeeze = _itself

    def masked_fill(self, mask: Any, value: Any) -> Self:
        """Return itself for the `PlannedMask` that stands for what tokens see."""
        if not hasattr(mask, "planned"):
            raise _other("another mask than the layer's")
        return self

    def __mul__(self, factor: Any) -> Self:
        if not isinstance(factor, Real) or factor <= 0 or self.weights is not None:
            raise _other(f"a product with {factor}")
        self.scale *= factor
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow relu, and the products with queries and with weights."""
        if function is torch.nn.functional.relu and args[0].queries is not None:
            args[0].clamped = True
            return args[0]
        if function is torch.matmul and isinstance(found := args[1], cls):
            if found.queries is None:
                found.queries = args[0]
            elif found.clamped and found.weights is None:
                found.weights = args[0].squeeze(-2)
            return found
        raise _other(getattr(function, "__name__", str(function)))

    def topk(self, topk: int, dim: int) -> Any:
        """Return the choice as `indices`."""
        if self.weights is None or dim != -1:
            raise _other("a choice before there are scores")
        return SimpleNamespace(indices=self.run(self.queries, self.keys, self.weights * self.scale, topk))


def _other(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"an indexer that asks for {what}",
        "its scores are known as a sum over heads of weights * relu(q . k)",
        TESTED,
    )


def is_sparse(module: Any) -> bool:
    """Return whether a layer reads chosen keys: of its own indexer, or of an earlier layer's."""
    return getattr(module, "indexer", None) is not None or bool(getattr(module, "skip_topk", False))


def follow(module: Any) -> None:
    """Replace an indexer's forward, or what expands the latents of a layer that reads chosen keys; once for a class."""
    name, ours = ("expand_kv", _latents) if is_sparse(module) else ("forward", _choice)
    if is_sparse(module) or INDEXER in vars(module).get(MUST_REACH, ()):
        surround(next(cls for cls in type(module).__mro__ if name in vars(cls)), name, ours)


def _distributed_forward(module: Any) -> Forward | None:
    """Return the forward that a module runs in; None for a local one, and for another model of the class."""
    forward = forward_of_context(getattr(module, CONTEXT, None))
    return forward if forward is not None and forward.distributed else None


def _latents(real: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return latents (batch, 1, local_seq, width), and those of values, in place of all heads' keys and values."""
    if _distributed_forward(layer) is None or not is_sparse(layer):
        return real(layer, *args, **kwargs)
    given = inspect.signature(real).bind(layer, *args, **kwargs).arguments
    return torch.cat([given["kv_nope"], given["k_rot"]], -1), given["kv_nope"]


def _choice(real: Any, indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the positions that an indexer chooses over the ranks, in a recompute those of the first pass.

    An indexer that is trained has gradients of its own weights, and none of what it is given.
    """
    if (forward := _distributed_forward(indexer)) is None:
        return real(indexer, *args, **kwargs)
    trains = torch.is_grad_enabled() and forward.context.indexers > 0
    framed = active_frame() is not None  # which keeps them
    kept = None if framed else forward.choices.get(indexer)
    if kept is not None and not trains:
        reach(INDEXER)
        return kept
    bound = inspect.signature(real).bind(indexer, *args, **kwargs)
    name = next(name for name in ("cache", "past_key_values") if name in bound.signature.parameters)

    def run(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk: int) -> Any:
        if trains:
            forward.scored[indexer] = q, k, weights
        if kept is not None:
            return kept
        with in_layer(indexer):
            return index_topk(q.detach(), k.detach(), weights.detach(), topk, **_seen(forward), **forward.where)

    def update_indexer(keys: torch.Tensor, layer: int) -> Indexed:
        reach(INDEXER)
        return Indexed(keys, forward.layout.length, run)

    given = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in bound.arguments.items()}
    given |= {name: SimpleNamespace(update_indexer=update_indexer)}
    with torch.set_grad_enabled(trains):
        positions = inspect.unwrap(real)(**given)  # without transformers' no_grad
    if not framed:
        forward.choices[indexer] = positions
    return positions


def _seen(forward: Forward) -> Arguments:
    if isinstance(forward.seen, Seen):
        return {"mask": mask_of(forward.seen, (), -1)}
    return {"cu_seqlens": forward.seen and list(forward.seen)}


def attend(
    layer: Any,
    qkv: tuple[torch.Tensor, ...],
    positions: torch.Tensor,
    forward: Forward,
    factors: torch.Tensor,
    call: Arguments,
) -> torch.Tensor:
    """Return attention (batch, local_seq, heads, v_head_dim) of queries over the latents at chosen positions.

    qkv: q (batch, local_seq, heads, qk_head_dim), and latents with one head, of keys and of values.
    factors: of `factors_of`.
    """
    q, latents, values = qkv
    inner = layer.qk_nope_head_dim
    of_keys, of_values = factors.split([inner, factors.shape[2] - inner], 2)
    q = torch.cat([torch.einsum("bshd,rhd->bshr", q[..., :inner], of_keys), q[..., inner:]], 3)
    seen, sinks = _seen(forward), call.pop("sinks")
    rows: Arguments = {"cu_seqlens": seen.get("cu_seqlens"), "head_dim_v": values.shape[3]}
    out, lse = sparse_attn(q, latents, None, positions, **rows, sinks=sinks, return_lse=True, **call)
    if (indexer := getattr(layer, "indexer", None)) in forward.scored:
        index_q, index_k, weights = forward.scored.pop(indexer)
        valid = None if forward.mask is None else forward.mask.bool()
        loss = index_loss(index_q, index_k, weights, q, latents, lse, positions, valid=valid, **seen, **call)
        forward.index_losses.setdefault(indexer, loss)
    found: torch.Tensor = torch.einsum("bshr,rhv->bshv", out, of_values)
    return found


def refusal(model: Any) -> str:
    """Return why the indexers of a model cannot be trained; "" if they can."""
    indexers = [module for module in model.modules() if INDEXER in vars(module).get(MUST_REACH, ())]
    trains = any(weight.requires_grad for module in indexers for weight in module.parameters())
    return "" if trains else "their weights have requires_grad=False" if indexers else "it has none"


def whole_loss(forward: Forward) -> torch.Tensor | None:
    """Return the sum of the losses of indexers over layers and ranks, None without; a recompute adds none to them."""
    if not (torch.is_grad_enabled() and forward.distributed and forward.context.indexers):
        return None
    parts = [part for part in forward.index_losses.values() if part is not None]
    forward.index_losses.update(dict.fromkeys(forward.index_losses))
    if not parts or not all(part.requires_grad for part in parts):
        what, why = "indexers that are trained in re-entrant checkpoints", "their loss would have no gradient"
        raise UnsupportedError(what, why, "use_reentrant=False")
    context, loss = forward.context, torch.stack(parts).sum()
    return as_whole(loss * context.size, context.group, "of indexers", weight=context.indexers)


def factors_of(layer: Any, values: torch.Tensor) -> torch.Tensor:
    """Return what a layer's `kv_b_proj`, with adapters, does to the numbers of a latent, (width, heads, k and v)."""
    if any(isinstance(x, torch.nn.Dropout) and x.p > 0 and x.training for x in layer.kv_b_proj.modules()):
        what, why = "dropout in kv_b_proj", "it goes to queries and outputs, which would have another for each"
        raise UnsupportedError(f"{what} of a layer of type {type(layer).__name__}", why, "lora_dropout=0.0 there")
    each = torch.eye(values.shape[3], dtype=values.dtype, device=values.device)
    found: torch.Tensor = layer.kv_b_proj(each)
    return found.view(len(each), layer.num_heads, -1)
