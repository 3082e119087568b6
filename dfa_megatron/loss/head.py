"""What makes logits of hidden states: the weight, and how it is cut over tensor-parallel ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import plain
from dfa_megatron.runtime.comm.groups import resolve

TILE = 4096
"""Tokens of a tile where nobody says; fewer make the product with the weight's gradient slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A language model's head: logits = softcap · tanh(scale · (hidden · weightᵀ + bias) / softcap).

    Without a softcap they are scale · (hidden · weightᵀ + bias).

    Attributes:
        weight: (rows, hidden size), this rank's rows of the vocabulary.
        bias: (rows,), or None.
        group: the ranks that share the vocabulary, in its order, or their mesh or name; None: this rank has all rows.
        sequence_parallel: each rank of the group has 1/TP of the tokens, in order. A tile gathers its tokens.
            Otherwise all ranks have all tokens, and the gradient of the hidden states is summed over the group.
        partition: the rows of every rank of the group; they may differ. None: the host reads them at every call.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    partition: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse factors that are no numbers, to which no gradient would come, and those that make all logits 0."""
        if self.group is not None:
            object.__setattr__(self, "group", resolve(self.group))
        for name, value in {"scale": self.scale, "softcap": 1 if self.softcap is None else self.softcap}.items():
            is_number = type(plain(value)) in (int, float) and 0 < (abs(value) if name == "scale" else value) < math.inf
            if not is_number:
                why = "it is a number, finite and not 0, to which no gradient comes"
                instead = "scale=1.0 and softcap=None for none, and hidden states times a learned scale"
                raise UnsupportedError(f"a head with {name}={value!r}", why, instead)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    @property
    def shards(self) -> int:
        """Return the number of ranks that share the tokens."""
        return self.ranks if self.sequence_parallel else 1

    def vocabulary(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Return the vocabulary's size and the index of this rank's first row, from the rows of every rank.

        Raises:
            UnsupportedError: they do not fit the group or the weight, or a rank has no row.
        """
        mine, rank = self.weight.shape[0], 0 if self.group is None else self.group.rank()
        if len(sizes) != self.ranks or sizes[rank] != mine or min(sizes) < 1:
            what = f"a vocabulary cut into {sizes} over {self.ranks} ranks, with {mine} rows on rank {rank}"
            why = "every rank needs rows, and the partition must say how many"
            raise UnsupportedError(what, why, "the number of rows of every rank, at least 1")
        ends = [0, *accumulate(sizes)]
        return ends[-1], ends[rank]
