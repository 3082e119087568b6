"""Rotary tables of multi-latent attention, computed in contiguous order; each layer makes its own table."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.refusals import CALLS, LAYERS


class ContiguousRotary:
    """Return this rank's rows of the table in contiguous order; the first base of every class that `_subclass` makes.

    Megatron's rotary modules compute the whole table and select its zigzag rows. These select the contiguous rows, so
    nothing is exchanged. Each holds the rows of the latest length, (length / CP, 1, 1, rotary_dim) float32.
    """

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the rows of this rank's tokens in a sequence of max_seq_len. Yarn also returns its cos/sin factor.

        Raises:
            UnsupportedError: packed_seq, which needs the rows of whole documents.
        """
        rotary: Any = self
        CALLS.check(packed_rotary=packed_seq)
        known = rotary.__dict__.get("_dfa_rows")
        if known is not None and known[0] == (max_seq_len, offset):
            return known[1]
        group = rotary.cp_group if cp_group is None else cp_group
        made = rotary.get_emb(max_seq_len, offset)
        whole, factor = made if isinstance(made, tuple) else (made, None)
        rows = whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()  # frees the whole table
        answer = rows if factor is None else (rows, factor)
        rotary.__dict__["_dfa_rows"] = ((max_seq_len, offset), answer)
        return answer

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype | None = None, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of yarn's rows, times its factor, for fused kernels: (seq_len / CP, 1, 1, dim).

        Megatron's function reuses the first rows of a longer table. If ranks share a table, these rows belong to other
        tokens, so this function always computes the given length.
        """
        rows, factor = self.forward(seq_len, offset, packed_seq)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return (rows.cos() * factor).to(dtype).contiguous(), (rows.sin() * factor).to(dtype).contiguous()


def make_contiguous(attention: Any) -> None:
    """Make the rotary table of a Megatron MultiLatentAttention follow contiguous tokens; nothing else changes.

    Raises:
        UnsupportedError: this attention does not make its table as in Megatron-Core 0.16 to 0.19.
    """
    rotary: Any = getattr(attention, "rotary_pos_emb", None)
    if not (callable(getattr(rotary, "get_emb", None)) and hasattr(rotary, "cp_group")):
        LAYERS.check(own_rotary=type(attention).__name__)
    base: Any = type(rotary)
    rotary.__class__ = _subclass(base)


@functools.cache
def _subclass(base: type) -> type:
    if issubclass(base, ContiguousRotary):
        return base
    return type(f"Contiguous{base.__name__}", (ContiguousRotary, base), {"__module__": __name__})
