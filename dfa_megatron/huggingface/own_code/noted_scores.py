"""Stand for the scores of a layer's own attention code until they meet the values, and then run distributed attention.

The code of such a layer multiplies queries and keys, scales, adds a mask, takes the softmax and multiplies values. The
first product gives `Scores`, which only note what is done to them. Whatever else is done to them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.huggingface.refusals import ATTENTION

_HIDES = torch.finfo(torch.float16).min / 2
"""A score below this hides a key."""
Run = Callable[["Scores", torch.Tensor], torch.Tensor]
"""From scores and values (batch, kv_heads, tokens, head_dim) to (batch, heads, tokens, head_dim)."""


@dataclass(frozen=True)
class Scores:
    """Scores that were never computed.

    Attributes:
        layer: the type of the layer, for messages.
        query: (batch, heads, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim).
        shape: that the layer sees.
        run: see `Run`.
        scale: of the product.
        slopes: (heads,), of a bias that grows with the key's place (ALiBi); None without.
        places_by_bias: the layer adds such a bias.
        mask: what stands in for the layer's mask.
        seen: keys that the last token sees by a causal mask of the layer's own; None without.
    """

    layer: str
    query: torch.Tensor
    key: torch.Tensor
    shape: torch.Size
    run: Run
    scale: float = 1.0
    slopes: torch.Tensor | None = None
    places_by_bias: bool = False
    mask: Any = None
    seen: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that scores would have."""
        return self.query.dtype

    @property
    def device(self) -> torch.device:
        """Return the device that scores would be on."""
        return self.query.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape that scores would have, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: Any) -> Scores:
        """Return the same with batch and heads as one dimension, or as two."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return replace(self, shape=torch.empty(self.shape, device="meta").view(sizes).shape)

    reshape = view

    def to(self, *_: Any, **__: Any) -> Scores:
        """Return itself: kernels choose their precision themselves."""
        return self

    float = type_as = to

    def __truediv__(self, divisor: Any) -> Scores:
        return replace(self, scale=self.scale / float(divisor))

    def __mul__(self, factor: Any) -> Scores:
        ATTENTION.check(own_code="a factor after a bias" if self.slopes is not None else None, layer=self.layer)
        return replace(self, scale=self.scale * float(factor))

    def __add__(self, mask: Any) -> Scores:
        if self.places_by_bias and isinstance(mask, torch.Tensor):
            return self.biased(mask)
        ATTENTION.check(position_bias=isinstance(mask, torch.Tensor), layer=self.layer)
        return replace(self, mask=self.mask if mask is None else mask)

    def biased(self, bias: torch.Tensor, factor: Any = 1.0) -> Scores:
        """Return the same with a bias (heads or more, 1, keys) in proportion to the key's place (ALiBi)."""
        known = self.slopes is None and bias.dim() == 3 and bias.shape[1] == 1 and bias.shape[2] > 1
        ATTENTION.check(own_code=None if known else f"a bias of shape {tuple(bias.shape)}", layer=self.layer)
        heads = self.query.shape[1]
        with torch._C.DisableTorchFunction():  # kernels want float32, whatever a mode makes of it
            slopes = (bias[:heads, 0, 1] - bias[:heads, 0, 0]).float() * factor
        return replace(self, slopes=slopes)

    def masked_fill(self, mask: Any, value: Any) -> Scores:
        """Return the same under what stands in for the layer's mask."""
        ATTENTION.check(
            own_code="masked_fill" if isinstance(mask, torch.Tensor) or value > _HIDES else None, layer=self.layer
        )
        return replace(self, mask=mask)

    def where(self, sees: torch.Tensor) -> Scores:
        """Return the same under a causal mask of the layer's own, a band (1, 1, tokens, tokens) below the diagonal."""
        tokens = self.shape[-1]
        band = sees.dtype is torch.bool and sees.shape == (1, 1, tokens, tokens)
        seen = int(sees[0, 0, -1].sum()) if band else 0
        expected = torch.ones(tokens, tokens, dtype=torch.bool, device=sees.device).tril().triu(1 - seen)
        ATTENTION.check(own_code=None if band and torch.equal(sees[0, 0], expected) else "where", layer=self.layer)
        return replace(self, seen=seen)

    def __matmul__(self, value: torch.Tensor) -> torch.Tensor:
        batch, heads = self.query.shape[:2]
        out = self.run(self, value if value.dim() == 4 else value.unflatten(0, (batch, -1)))
        return out if value.dim() == 4 else out.reshape(batch * heads, *out.shape[2:])

    def __getattr__(self, name: str) -> Any:
        """Refuse what else a layer does to its scores; others may ask for what no tensor has."""
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        ATTENTION.check(own_code=name, layer=self.layer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a causal mask, a softmax and a dropout that does nothing, and multiply; refuse all else."""
        kwargs = kwargs or {}
        scores = next(x for x in args if isinstance(x, Scores))
        if func in (torch.matmul, torch.bmm) and args[0] is scores:
            return scores @ args[1]
        if func is torch.where and args[1] is scores and bool(torch.as_tensor(args[2] < _HIDES).all()):
            return scores.where(args[0])
        if func in (F.softmax, torch.softmax):
            return scores
        if func in (F.dropout, torch.dropout):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            ATTENTION.check(dropout=given["p"] if given["training"] else 0.0)
            return scores
        ATTENTION.check(own_code=getattr(func, "__name__", str(func)), layer=scores.layer)
        return NotImplemented
