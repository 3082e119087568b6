"""How the batches of a context-parallel group are cut.

`shard_batch` declares its own batches. Undeclared ones count as Megatron's: rows are cut zigzag, and packs document by
document, unless the flags of the script cut whole rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.script.dfa_flags import packing_of_script

OUTSIDE = {"contiguous": "contiguous", "boundary": "zigzag", "zigzag": "zigzag"}
"""The layout of a batch outside of the model, for each value of data_layout."""

DESCRIBED = "_dfa_described"
"""The attribute of a tensor that `shard_batch` cut: whether its row has documents, a tree or a mask."""


@dataclass(slots=True)
class Cuts:
    """How batches are cut over a group.

    layout: contiguous or zigzag. tokens: of a rank, in batches that `shard_batch` cut, and whether all such batches had
    documents, a tree or a mask; None where own code cuts.
    """

    layout: str
    tokens: dict[int, bool] | None


DECLARED: WeakKeyDictionary[dist.ProcessGroup, Cuts] = WeakKeyDictionary()


def declare_batch_layout(cp_group: dist.ProcessGroup, layout: str) -> None:
    """Declare how this process cuts batches over a context-parallel group: "contiguous" or "zigzag".

    `shard_batch` declares its own batches. Call this only if your own code cuts. A model cannot tell contiguous tokens
    from zigzag ones, so in layout `contiguous` it refuses to run on undeclared batches. Where only `shard_batch` cuts,
    it refuses batches of other lengths too, because nobody cut them.
    """
    if layout not in ("contiguous", "zigzag"):
        raise UnsupportedError(f"the batch layout {layout!r}", "there is no such layout", "contiguous or zigzag")
    DECLARED[cp_group] = Cuts(layout, None)


def cuts_documents(cp_group: dist.ProcessGroup) -> bool:
    """Return whether undeclared packs of a group count as cut zigzag document by document, as by TransformerEngine."""
    return cp_group.size() > 1 and cp_group not in DECLARED and packing_of_script() != "rows"


def check_described(given: Iterable[Any], cp_group: dist.ProcessGroup, tokens: int) -> None:
    """Refuse a call without packed_seq_params on tensors that `shard_batch` cut from a row with documents.

    Copies, as `.to` makes them, have no mark: they are known by their number of tokens on this rank.
    """
    cuts = DECLARED.get(cp_group)
    alone = cuts is not None and cuts.tokens is not None and cuts.tokens.get(tokens, False)
    if alone or any(getattr(x, DESCRIBED, False) for x in given):
        raise UnsupportedError(
            "a call without the packed_seq_params of a batch that `shard_batch` cut from a row with documents",
            "every token would attend to all before it, in other documents too",
            "model(**batch) with all that shard_batch returns",
        )


def check_positions(cp_group: dist.ProcessGroup, data_layout: str, positions: torch.Tensor) -> None:
    """Refuse positions (batch, tokens) of a whole batch, where a rank's own would be two pieces of them.

    Only where nobody has declared how batches are cut: `shard_batch` knows their lengths.
    """
    if data_layout == "contiguous" or cp_group.size() == 1 or cp_group in DECLARED:
        return
    if bool((positions == torch.arange(positions.shape[1], device=positions.device)).all()):
        raise UnsupportedError(
            f"position_ids that count from 0 to {positions.shape[1]} on a rank, in layout {data_layout!r}",
            "nobody cut the batch, and each rank would take the whole of it for its own part; or they are not the "
            "cut positions of the tokens",
            "get_batch_on_this_cp_rank or shard_batch for every entry of every batch; or declare_batch_layout "
            "where your own code cuts",
        )


def check_declared(
    cp_group: dist.ProcessGroup, data_layout: str, tokens: int, *, packed: bool = False, ours: bool = False
) -> None:
    """Refuse tokens of this rank that are cut for another layout than the model's, or not at all.

    packed: there are documents. ours: `shard_batch` described them.
    """
    if cp_group.size() == 1:
        return
    cuts = DECLARED.get(cp_group) or Cuts("zigzag", None)
    if cuts.layout != OUTSIDE[data_layout]:
        known = f"are cut {cuts.layout}" if cp_group in DECLARED else "nobody is known to have cut in order"
        raise UnsupportedError(
            f"data_layout={data_layout!r} on batches that {known}",
            "the layers would mistake the order of the tokens",
            "dfa_megatron.megatron.shard_batch with the model's options, declare_batch_layout where your own code "
            "cuts, or data_layout='boundary' for Megatron's own batches",
        )
    if cuts.tokens and tokens not in cuts.tokens:
        raise UnsupportedError(
            f"a batch of {tokens} tokens on a rank that `shard_batch` did not cut",
            "each rank would take the whole of it for its own part of a longer sequence",
            "shard_batch for every batch, of evaluation too; or declare_batch_layout where your own code cuts",
        )
    if packed and cuts.tokens is not None and not ours and packing_of_script() != "rows":
        raise UnsupportedError(
            "packed_seq_params that `shard_batch` did not make, after batches that it cut",
            "a trainer's own packs are cut document by document, and would be read as a row that was cut whole",
            "model(**batch) with all that shard_batch returns; or no shard_batch in this process, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code cuts whole rows",
        )
    if packed and data_layout != "boundary" and cuts_documents(cp_group):
        raise UnsupportedError(
            f"packed documents in data_layout={data_layout!r} that nobody is known to have cut by rows",
            "Megatron cuts them one by one, each in zigzag order, with TransformerEngine's help",
            "--dfa-data-layout boundary, dfa_megatron.megatron.shard_batch with the model's options, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code cuts whole rows",
        )
