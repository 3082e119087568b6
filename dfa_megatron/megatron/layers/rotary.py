"""Rotary rows of this rank's tokens: of Megatron's table, and of the tables that latent attentions make by layer."""

from __future__ import annotations

import functools
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.replace import reach, with_ours
from dfa_megatron.megatron.tokens.document_order import DocumentOrder, RowOrder
from dfa_megatron.megatron.tokens.exchange import in_order
from dfa_megatron.megatron.tokens.packed_documents import Pack
from dfa_megatron.megatron.tokens.visit import Visit, current_visit
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.sharding import local_positions


class OrderedRotary:
    """Return this rank's rows of the table in the layout's order; the first base of their class.

    Megatron's rotary modules compute the whole table and select its zigzag rows. These select the rows of this rank's
    tokens, or of their positions in their documents, so nothing is exchanged. Each holds the rows of the latest length
    and pack, (length / CP, 1, 1, rotary_dim) float32.
    """

    dfa_layout = "contiguous"
    dfa_reaches = ("rotary rows",)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Return the rows of this rank's tokens in max_seq_len tokens. Yarn also returns its cos/sin factor."""
        rotary: Any = self
        reach("rotary rows")
        layout: str | Layout = self.dfa_layout
        visit, pack = current_visit(), None
        group = rotary.cp_group if cp_group is None else cp_group
        if visit is not None:
            group, layout, pack = visit.group, visit.layout, visit.pack
        if pack is not None:
            max_seq_len = pack.longest
        key = (max_seq_len, offset, pack, group)
        known = rotary.__dict__.get("_dfa_rows")
        if known is not None and known[0] == key:
            return known[1]
        made = rotary.get_emb(max_seq_len, offset)
        whole, factor = made if isinstance(made, tuple) else (made, None)
        if visit is None or pack is None:
            mine = local_positions(max_seq_len, group=group, layout=layout, device=whole.device)
        else:
            mine = pack.positions(visit.rows[1], group, layout, whole.device)
        rows = whole.index_select(0, mine)
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
    rotary.__class__ = with_ours(OrderedRotary, base)
    rotary.dfa_layout = layout


def rotary_rows(table: Any, visit: Visit, layer: Any) -> Any:
    """Return the rotary rows of this rank's tokens, of the table that Megatron gives a layer; made once for a table.

    A pack counts in documents or paths. Without one, or where Megatron made a slice for it, that slice is exchanged.

    Args:
        table: (rows, 1, 1, rotary_dim), a tuple of such, or None.
        visit: the call.
        layer: the `DistributedAttentionLayer`.
    """
    pack, shared = visit.pack, layer._dfa
    if pack is not None and not pack.table_is_sliced and getattr(layer.config, "mrope_section", None) is None:
        return pack.tables.rows(table, functools.partial(_rows_by_position, visit, pack))
    if shared.options.data_layout == "zigzag" or visit.group.size() == 1:
        return table
    if pack is not None and isinstance(pack.order, DocumentOrder):
        own = type(layer.self_attention).__module__.startswith("megatron.core.")
        return pack.tables.rows(table, functools.partial(_rows_of_images, visit, pack.order, own))
    tables = shared.tables if pack is None or pack.group is None else pack.tables
    return tables.rows(table, functools.partial(in_order, visit.exchange, visit.rows[1], "zigzag"))


def _rows_by_position(visit: Visit, pack: Pack, table: torch.Tensor) -> torch.Tensor:
    """Return the rows (tokens, 1, 1, rotary_dim) of a table of positions.

    Raises:
        UnsupportedError: the table is shorter than a document, or the pack and the ranks differ in tokens.
    """
    positions = pack.positions(visit.rows[1], visit.group, visit.layout, table.device)
    if (longest := pack.longest) > table.shape[0]:
        raise UnsupportedError(
            f"packed_seq_params with max_seqlen {table.shape[0]}",
            f"a document has {longest} tokens, and the last ones would have no rotary embedding",
            f"max_seqlen_q={longest}",
        )
    return table.index_select(0, positions)


def _rows_of_images(visit: Visit, order: DocumentOrder, row_slice: bool, table: torch.Tensor) -> torch.Tensor:
    """Return the rows of a multimodal table (all tokens with padding, ...), of documents that were cut one by one.

    row_slice: a table of this rank's tokens is known to be the zigzag slice of the row, which Megatron's module makes.

    Raises:
        UnsupportedError: it is not known, or the table has other rows.
    """
    exchange, tokens = visit.exchange, visit.rows[1]
    if table.shape[0] == tokens * exchange.ranks:
        mine = torch.argsort(order.inside_of_rows())[exchange.member * tokens :][:tokens]
        return table.index_select(0, mine.to(table.device))
    if not row_slice:
        raise UnsupportedError(
            "a multimodal table of a rank's tokens, in attention not Megatron's, with documents cut one by one",
            "nobody tells the order of its rows",
            "the table of all tokens with padding, or dfa_megatron.megatron.shard_batch with the model's options",
        )
    return in_order(exchange, tokens, RowOrder(order), table)
