"""The fold of states over the pieces of ranks and its transpose, as pure functions.

Over a piece's tokens a linear recurrence is affine in the state that comes in: `S_out = M S_in + S_local`, for each
head. M is a number (Mamba-2, lightning attention), a vector over keys (GLA), an array like the state (Mamba-1), or a
matrix (delta rule, gated delta rule, KDA). The first three multiply elementwise, by broadcasting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

Carry = tuple[torch.Tensor, torch.Tensor]
"""(M, S) of a piece; M does not matter where no state comes in."""


def apply(m: torch.Tensor, state: torch.Tensor, *, matrix: bool) -> torch.Tensor:
    """Return M S. matrix: m is (..., keys, keys), else it broadcasts against the state (..., keys, values)."""
    return m @ state if matrix else m * state


def compose(carries: Mapping[int, Carry], before: Sequence[int], *, matrix: bool) -> dict[int, Carry]:
    """Return (M, S) of each piece together with the pieces before it on its path that are among these.

    Args:
        carries: of pieces, by number, in order.
        before: for each number, that of the piece before it; -1 for none.
    """
    found: dict[int, Carry] = {}
    for piece, (m, local) in carries.items():
        if came := found.get(before[piece]):
            m = m.to(came[1].dtype)
            m, local = apply(m, came[0], matrix=matrix), apply(m, came[1], matrix=matrix) + local
        found[piece] = m, local
    return found


def fold(
    carries: Mapping[int, tuple[torch.Tensor | None, torch.Tensor]],
    source: Sequence[int],
    wanted: Iterable[int],
    *,
    matrix: bool,
) -> dict[int, torch.Tensor]:
    """Return the final states of the wanted pieces, and of those that they come from.

    Args:
        carries: (M, S_local) of pieces, by number.
        source: for each number, that of the piece whose final state comes in; -1 for none.
    """
    found, above = dict[int, torch.Tensor](), {*wanted}
    for piece in sorted(carries, reverse=True):
        if piece in above:
            above.add(source[piece])
    for piece in sorted(above - {-1}):
        m, local = carries[piece]
        came = found.get(source[piece])
        found[piece] = local if came is None or m is None else apply(m, came, matrix=matrix) + local
    return found


def fold_back(
    carries: Mapping[int, torch.Tensor | None],
    gradients: Mapping[int, torch.Tensor],
    source: Sequence[int],
    wanted: Iterable[int],
    *,
    matrix: bool,
) -> dict[int, torch.Tensor]:
    """Return the gradients of the wanted pieces' final states: the sum of what reads them, and of what they go into.

    Args:
        carries: M of pieces, by number.
        gradients: of the final states where ranks read them, by number.
    """
    total, below = dict(gradients), {*wanted}
    for piece in sorted(carries):
        if source[piece] in below:
            below.add(piece)
    for piece in sorted(below, reverse=True):
        m, above = carries[piece], source[piece]
        if above in below and m is not None and piece in total:
            passed = apply(m.mT if matrix else m, total[piece], matrix=matrix)
            total[above] = total[above] + passed if above in total else passed
    return {piece: total[piece] for piece in wanted if piece in total}


def gradient_of_m(outgoing: torch.Tensor, incoming: torch.Tensor, m: torch.Tensor, *, matrix: bool) -> torch.Tensor:
    """Return the gradient of M from that of the outgoing state, and the state that came in."""
    return outgoing @ incoming.mT if matrix else (outgoing * incoming).sum_to_size(m.shape)
