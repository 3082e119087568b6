"""The fold of states over ranks and its transpose, as pure functions over lists.

Over the tokens of a rank a linear recurrence is affine in the state that comes in: `S_out = M S_in + S_local`, for each
head. M is a number (Mamba-2, lightning attention), a vector over keys (GLA), an array like the state (Mamba-1), or a
matrix (delta rule, gated delta rule, KDA). The first three multiply elementwise, by broadcasting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Carry = tuple[torch.Tensor | None, torch.Tensor]
"""(M, S) of a rank; M is None where it does not matter."""


def apply(m: torch.Tensor, state: torch.Tensor, *, matrix: bool) -> torch.Tensor:
    """Return M S. matrix: m is (..., keys, keys), else it broadcasts against the state (..., keys, values)."""
    return m @ state if matrix else m * state


def fold(carries: Sequence[Carry], *, matrix: bool) -> torch.Tensor | None:
    """Return the state after these ranks, the oldest first; None for no ranks.

    The M of the oldest rank is not used: nothing comes into it.
    """
    state: torch.Tensor | None = None
    for m, local in carries:
        state = local if state is None or m is None else apply(m, state, matrix=matrix) + local
    return state


def fold_back(carries: Sequence[Carry], *, matrix: bool) -> torch.Tensor | None:
    """Return the gradient of a rank's outgoing state from (M, gradient of S_in) of the ranks after it, nearest first.

    The M of the last rank is not used: the state does not leave it.
    """
    turned = [(None if m is None else m.mT if matrix else m, gradient) for m, gradient in reversed(carries)]
    return fold(turned, matrix=matrix)


def gradient_of_m(outgoing: torch.Tensor, incoming: torch.Tensor, m: torch.Tensor, *, matrix: bool) -> torch.Tensor:
    """Return the gradient of M from that of the outgoing state, and the state that came in."""
    return outgoing @ incoming.mT if matrix else (outgoing * incoming).sum_to_size(m.shape)
