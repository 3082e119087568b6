"""What stands in for the masks of layers: the plan holds causality, windows, chunks, documents and padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import refuse_unreached
from dfa_megatron.huggingface.current_forward import NAME, innermost


@dataclass(frozen=True, slots=True)
class PlannedMask:
    """Replace the mask of a layer. Models slice it, but do not copy it: no tensor.

    size: tokens that a token sees, including itself; of layers with chunks, the tokens of a chunk. None for all.
    planned: whether it hides no more than that; a layer that is given another may never run.
    """

    size: int | None = None
    planned: bool = True
    dtype: ClassVar = torch.bool

    def __getitem__(self, index: tuple[Any, ...]) -> Self:
        """Return itself for a slice of all queries."""
        if any(part not in (slice(None), slice(0, None)) for part in index[2:3]):
            raise UnsupportedError(
                "logits_to_keep in a model whose layers share keys",
                "the layers that share them would have fewer queries than keys",
                "logits_to_keep=0",
            )
        return self

    def __invert__(self) -> Self:
        return self

    def to(self, *_: Any) -> Self:
        """Return itself for any dtype."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        """Refuse a layer that computes with its mask."""
        refuse_unreached(getattr(innermost(), "owner", None), [NAME])


_HIDES_NOTHING = "_dfa_hides_nothing"  # the attribute of a mask that need not be read


def nothing_hidden(tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask that hides nothing; given one, transformers does not look for documents in the positions."""
    everything = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    setattr(everything, _HIDES_NOTHING, True)
    return everything


def mask(**given: Any) -> Any:
    """Return what layers get as their mask: once per forward, and in a local one by the former implementation."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    call = innermost()
    if call is None or call.forward.distributed:
        return _planned(**given)
    former = call.forward.context.before
    return ALL_MASK_ATTENTION_FUNCTIONS[former](**given) if former in ALL_MASK_ATTENTION_FUNCTIONS else None


def _planned(
    *,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    mask_function: Any = None,
    **others: Any,
) -> PlannedMask:
    """Return what stands in for a mask.

    attention_mask: (batch, local_seq) as the user gave it, or `nothing_hidden`.
    mask_function: what it hides; models that make a mask whatever the batch may still mean a causal one.
    local_size: the sliding window of the layers that this mask is for, or their chunk; None for those without.
    """
    from transformers.masking_utils import causal_mask_function

    if attention_mask is not None and not hasattr(attention_mask, _HIDES_NOTHING) and not bool(attention_mask.all()):
        raise UnsupportedError(
            "an attention_mask with padding",
            "padded tokens would be attended to",
            "padding on the right, which is checked and removed before the layers see it",
        )
    return PlannedMask(local_size, planned=allow_is_causal_skip or mask_function is causal_mask_function)
