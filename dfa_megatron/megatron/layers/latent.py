"""Rotary tables of multi-latent attention, in the order of a rank's tokens; each layer makes its own table."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.packed_documents import PlacedPack
from dfa_megatron.sharding import local_positions


class OrderedRotary:
    """Return this rank's rows of the table in the layout's order; the first base of every class that `_subclass` makes.

    Megatron's rotary modules compute the whole table and select its zigzag rows. These select the rows of this rank's
    tokens, or of their positions in their documents, so nothing is exchanged. Each holds the rows of the latest length
    and pack, (length / CP, 1, 1, rotary_dim) float32.
    """

    dfa_layout = "contiguous"
    dfa_pack: PlacedPack | None = None
    """The documents of the micro-batch; the layer sets it before every forward."""

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the rows of this rank's tokens in max_seq_len tokens. Yarn also returns its cos/sin factor."""
        rotary: Any = self
        pack, layout = self.dfa_pack, self.dfa_layout
        documents = None if pack is None else pack.offsets
        group = rotary.cp_group if cp_group is None else cp_group
        if pack is not None and pack.group is not None:  # Megatron counts the model's ranks
            group, max_seq_len, layout = pack.group, pack.offsets[-1], pack.layout(layout)
        key = (max_seq_len, offset, documents, group)
        known = rotary.__dict__.get("_dfa_rows")
        if known is not None and known[0] == key:
            return known[1]
        made = rotary.get_emb(max_seq_len, offset)
        whole, factor = made if isinstance(made, tuple) else (made, None)
        held = local_positions(max_seq_len, group=group, layout=layout, device=whole.device, cu_seqlens=documents)
        rows = whole.index_select(0, held)
        answer = rows if factor is None else (rows, factor)
        rotary.__dict__["_dfa_rows"] = (key, answer)
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


def order_rotary(attention: Any, layout: str) -> None:
    """Make the rotary table of a Megatron MultiLatentAttention follow this rank's tokens; nothing else changes.

    Args:
        attention: the module, whose rotary_pos_emb gets another class.
        layout: "contiguous" or "zigzag", the layout inside the layers.

    Raises:
        UnsupportedError: this attention does not make its table as in Megatron-Core 0.16 to 0.19.
    """
    rotary: Any = getattr(attention, "rotary_pos_emb", None)
    if not (callable(getattr(rotary, "get_emb", None)) and hasattr(rotary, "cp_group")):
        raise UnsupportedError(
            f"latent attention of class {type(attention).__name__}",
            "its rotary table is not made by a module whose order of tokens can be chosen",
            "a subclass of Megatron's MultiLatentAttention that makes its table as it does",
        )
    base: Any = type(rotary)
    rotary.__class__ = _subclass(base)
    rotary.dfa_layout = layout


@functools.cache
def _subclass(base: type) -> type:
    if issubclass(base, OrderedRotary):
        return base
    return type(f"Ordered{base.__name__}", (OrderedRotary, base), {"__module__": __name__})
