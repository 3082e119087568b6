"""ALiBi: a bias of -slope * |i - j| on the scores of tokens i and j, whose positions a call is told row by row."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

import torch

from dfa_megatron.kernels.api import Capping


@dataclass(frozen=True, slots=True)
class Alibi:
    """The bias of one call.

    slopes: (heads,), float32, contiguous. q_positions (q_len,), kv_positions (kv_len,): the tokens that the call's rows
        are, int32, contiguous. A call's own row numbers do not tell: neighbouring rows may be tokens far apart.

    The bias is taken from the distance of the two tokens, an integer, so that float32 is exact for those that matter
    however long the sequence is. Source: Press, Smith, Lewis 2022, arXiv 2108.12409; flash-attn's `alibi_slopes`.
    """

    slopes: torch.Tensor
    q_positions: torch.Tensor
    kv_positions: torch.Tensor

    def of_rows(self, rows: slice, columns: slice) -> Alibi:
        """The same for some rows of the call's queries, and of its keys."""
        return Alibi(self.slopes, self.q_positions[rows], self.kv_positions[columns])


class Biasing(Capping):
    """A base of kernels that can add ALiBi's bias to (capped) scores; as they stand they add none."""

    alibi: Alibi | None = None

    def biased(self, alibi: Alibi) -> Self:
        """The same kernel with the bias of one call."""
        kernel = copy.copy(self)
        kernel.alibi = alibi
        return kernel
