"""The head's memory account, in bytes; without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """Bytes beside weight and hidden states at the fullest moment of a backward; `tile` has the logits."""

    tile: int
    weight_gradient: int
    hidden_gradient: int
    numbers: int

    @property
    def together(self) -> int:
        """Return their sum."""
        return self.tile + self.weight_gradient + self.hidden_gradient + self.numbers


def head_bytes(
    tokens: int, vocabulary: int, hidden: int, tile: int | None, *, itemsize: int = 2, entropy: bool = False
) -> HeadMemory:
    """Predict the memory of a head's loss and its gradients on one rank, beside weight and hidden states.

    Args:
        tokens: of this rank.
        vocabulary: this rank's rows.
        hidden: the hidden size.
        tile: tokens of a tile; None: the logits of all tokens at once, in float32 beside the model's dtype, and their
            gradient the same. That is Megatron's loss and transformers'.
        itemsize: bytes of an element of weight and hidden states: 2, 4 or 8.
        entropy: it is computed too.
    """
    wide = max(itemsize, 4)
    rounded = itemsize if itemsize < wide else 0  # the logits before they are made wider, or their gradient after
    product = vocabulary * hidden * rounded  # of a tile, added to the wider sum
    if tile is None:
        return HeadMemory(
            tile=tokens * vocabulary * (wide + itemsize),
            weight_gradient=vocabulary * hidden * itemsize,
            hidden_gradient=tokens * hidden * itemsize,
            numbers=0,
        )
    rows = min(tile, tokens)
    widest = wide * (2 if entropy else 1)
    return HeadMemory(
        tile=max(rows * vocabulary * max(wide + rounded, widest), rows * vocabulary * itemsize + product),
        weight_gradient=vocabulary * hidden * wide,
        hidden_gradient=tokens * hidden * itemsize,
        numbers=tokens * wide * 16,
    )
