"""Rotary rows of this rank's tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.layers.swapped import ONE_RANK
from dfa_megatron.megatron.replace import reach, with_ours
from dfa_megatron.megatron.tokens.visit import Visit, current_visit


class OrderedRotary:
    """Return this rank's rows of a rotary table; the first base of the class of Megatron's modules.

    Megatron's modules make the whole table and select its zigzag rows, in a pack none. These select the row of each
    token of this rank: of its position in its document, in a multimodal table of its place in the batch's row. Each
    holds the rows of the latest length and pack, (length / CP, 1, 1, rotary_dim) float32.
    """

    dfa_reaches = ("rotary rows",)

    cp_group = property(lambda _: ONE_RANK, lambda *_: None)
    """The group by which Megatron's module selects rows, and which trainers swap: it is to make the whole table."""

    @torch.inference_mode(False)  # training saves the rows for its backward
    def forward(self, length: Any, *args: Any, cp_group: Any = None, **how: Any) -> Any:
        """Return the rows of this rank's tokens, in yarn with the factor of its cosines and sines.

        length: tokens of the sequence; or the position_ids (3, batch, tokens) of multimodal tables. The call of the
        model says who shares its tokens, not cp_group.
        """
        reach("rotary rows")
        visit = current_visit()
        of_images = isinstance(length, torch.Tensor)
        if visit is not None:
            visit.has_rotated = True
            length = length if of_images or visit.pack is None else visit.pack.longest
        where = None if visit is None else (visit.pack, visit.group, visit.layout)
        key = None if of_images else (length, args, how.get("offset"), where)
        known = vars(self).get("_dfa_rows")
        if known is not None and key is not None and known[0] == key:
            return known[1]
        how.update({"packed_seq": True} if "packed_seq" in how else {})  # modules in this one select nothing either
        whole = inspect.unwrap(super(OrderedRotary, type(self)).forward)(self, length, *args, **how)  # type: ignore[misc]
        rows = whole if visit is None else rows_of(whole, visit, of_images=of_images)
        if key is not None:
            vars(self)["_dfa_rows"] = (key, rows)
        return rows

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype | None = None, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of yarn's rows, times its factor, for fused kernels: (seq_len / CP, 1, 1, dim).

        Megatron's function reuses the first rows of a longer table. If ranks share a table, these rows belong to other
        tokens, so this function always computes the given length.
        """
        rows, factor = self.forward(seq_len, offset, packed_seq=packed_seq)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        return (rows.cos() * factor).to(dtype).contiguous(), (rows.sin() * factor).to(dtype).contiguous()


def order_rotary(owner: Any) -> None:
    """Have the rotary module of a language model, or of a latent attention, return this rank's rows."""
    rotary: Any = getattr(owner, "rotary_pos_emb", None)
    if not isinstance(rotary, torch.nn.Module):
        raise UnsupportedError(
            f"latent attention of class {type(owner).__name__}",
            "its rotary table is not made by a module of its own, whose rows could be chosen",
            "a subclass of Megatron's MultiLatentAttention that makes its table as it does",
        )
    base: Any = type(rotary)
    rotary.__class__ = with_ours(OrderedRotary, base)
    vars(rotary).pop("cp_group", None)


def rows_of(table: Any, visit: Visit, *, of_images: bool = False) -> Any:
    """Return the rows of this rank's tokens in a whole table (rows, ...), or in each of several.

    of_images: a row is of a place in the batch's row, not of a position in a document.
    """
    pack = None if of_images else visit.pack
    needed = visit.tokens if pack is None else pack.longest

    def pick(rows: Any) -> Any:
        if not isinstance(rows, torch.Tensor):
            return rows
        if rows.shape[0] < needed:
            raise UnsupportedError(
                f"a rotary table of shape {tuple(rows.shape)} for {needed} positions",
                "its first dimension must be the positions of the whole sequence, or of the longest document",
                f"a table ({needed}, 1, 1, rotary_dim), of which each rank takes the rows of its own tokens",
            )
        return rows.index_select(0, visit.positions(rows.device, in_documents=not of_images))

    return tree_map(pick, table)
