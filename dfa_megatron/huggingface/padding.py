"""Check that padding is on the right. It needs no mask: under a causal mask later tokens do not affect a token.

An `attention_mask` is checked and then dropped: it may hide only padding on the right, and no padded token may have a
loss. The outputs of padded tokens differ from those of an attention that masks them; nobody uses them.
"""

from __future__ import annotations

import torch

from dfa_megatron.errors import UnsupportedError

CAUSAL = "causal self-attention over whole, unpadded sequences"

IGNORED = -100
"""The label of a token that has no loss, as everywhere in transformers."""


def next_labels(labels: torch.Tensor, ignored: int = IGNORED) -> torch.Tensor:
    """Return the label of the next token of each token, (batch, seq); `ignored` for the last."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()


def check_right(mask: torch.Tensor, labels: torch.Tensor | None = None) -> None:
    """Check that a mask hides only the ends of whole sequences.

    Args:
        mask: (batch, seq), 0 for padding.
        labels: of the tokens, as the mask; None without.

    Raises:
        UnsupportedError: a padded token comes before a token that is not padding, or has a label; a mask holds other
            numbers than 0 and 1, or it has other dimensions.
    """
    if mask.dim() != 2:
        raise UnsupportedError("a ready-made attention mask", "attention is causal by construction", CAUSAL)
    real = mask.bool()
    other = mask != real.to(mask.dtype)
    labelled = torch.zeros_like(real) if labels is None else (labels != IGNORED) & ~real
    if bool(other.any()):
        raise UnsupportedError(
            "an attention_mask with other values than 0 and 1",
            "transformers takes each of them for a token to attend to: numbered documents would see each other, and "
            "what is added to scores would not be",
            "1 for tokens and 0 for padding; position_ids that begin at 0 in each document, or cu_seq_lens_q",
        )
    if bool((real[:, 1:] > real[:, :-1]).any()):
        raise UnsupportedError(
            "an attention_mask with padding that is not on the right",
            "padded tokens would be attended to",
            "tokenizer.padding_side='right', or sequences without padding",
        )
    if bool(labelled.any()):
        raise UnsupportedError(
            "labels of padded tokens",
            "an attention that masks padding would give them another output",
            "the label -100 for padding, as transformers' collators write it",
        )
