"""What the two backward kernels in Triton read of one call, and the constants that they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dfa_megatron.kernels.alibi import Alibi
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.triton.support import Diagonals, Packed, interpreted, padded


@dataclass(frozen=True, slots=True)
class Call:
    """What both kernels read of a call; last dimensions, lse and delta are contiguous, and scale is at least 0.

    segments: of a call with several and a batch of one; `diagonals` then say nothing. softcap: of the scores, 0 for
        none; a kernel is compiled for each. alibi: their bias.
    """

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    diagonals: Diagonals
    scale: float
    segments: Segments | None = None
    softcap: float = 0.0
    alibi: Alibi | None = None

    def packed(self, by: Literal["rows", "columns"], block: int) -> Packed | None:
        """The programs of a call of several segments."""
        return None if self.segments is None else Packed.of(self.segments, by, block, self.q.device)

    @property
    def writes_all(self) -> bool:
        """Every row of the gradients is written by a kernel."""
        return self.segments is None or self.segments.is_whole

    def strides(self) -> tuple[int, ...]:
        """Of q, k, v and dout, without the last dimension's."""
        return tuple(stride for x in (self.q, self.k, self.v, self.dout) for stride in x.stride()[:3])

    def constants(self, sizes: tuple[int, ...], packed: Packed | None, *, even: bool) -> dict[str, float]:
        """The compile-time arguments and launch options that both kernels have."""
        dim, dim_v = self.q.shape[-1], self.v.shape[-1]
        block_m, block_n, warps, stages = sizes
        return {
            "DIM": dim,
            "DIM_V": dim_v,
            "HAS_LO": packed.has_lo if packed else self.diagonals.has_lo,
            "HAS_HI": packed.has_hi if packed else self.diagonals.has_hi,
            "EVEN": even and packed is None,
            "PACKED": packed is not None,
            "CAP": self.softcap,
            "ALIBI": self.alibi is not None,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": padded(dim),
            "BLOCK_DV": padded(dim_v),
            "UPCAST": interpreted(),
            "num_warps": warps,
            "num_stages": stages,
        }


def heads_of_a_program(group: int, programs: int, wanted: int) -> int:
    """How many heads of its group one program sums: all of them, or a divisor, where programs would be too few."""
    share = group
    while programs * (group // share) < 2 * wanted and share > 1:
        share = max(divisor for divisor in range(1, share) if group % divisor == 0)
    return share
