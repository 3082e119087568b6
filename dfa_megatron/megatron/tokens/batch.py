"""Slice a batch over the context-parallel ranks in the layout that the layers expect."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.script.dfa_flags import packing_of_script
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import shard_sequence, tree_positions

logger = logging.getLogger("dfa_megatron.megatron")

_DATA_LAYOUT = {"contiguous": "contiguous", "boundary": "zigzag", "zigzag": "zigzag"}
"""The slicing of the data for each value of data_layout."""

_PAIRS = ("cu_seqlens", "prompt_tree", "mask")
"""The entries that say which tokens of a row attend to which; a batch has one of them, or rows are causal."""

_WHOLE = (*_PAIRS, "mask_positions", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
"""The entries of a batch that describe whole rows and are not sliced."""

_CUT = "_dfa_cut"
"""The attribute of a tensor from `shard_batch`: (it is a part, its row has documents, a tree or a mask)."""


@dataclass(slots=True)
class _Slicing:
    """How the batches of a context-parallel group are sliced, which a model cannot see in its input.

    order: "contiguous" or "zigzag". tokens: of a rank, in batches that `shard_batch` cut, and whether one of them had
    no documents; None where own code slices. compared: those that were the tokens of a whole row too.
    """

    order: str
    tokens: dict[int, bool] | None
    compared: set[int] = field(default_factory=set)

    def add(self, lengths: set[int], ranks: int, *, plain: bool) -> None:
        """Add the tokens of every rank in rows of these lengths; plain: without documents."""
        known = {} if self.tokens is None else self.tokens
        for tokens in {by_name(self.order, n, ranks).tokens(rank) for n in lengths for rank in range(ranks)}:
            known[tokens] = plain or known.get(tokens, False)


_DECLARED: WeakKeyDictionary[dist.ProcessGroup, _Slicing] = WeakKeyDictionary()


def shard_batch(batch: Mapping[str, Any], cp_group: dist.ProcessGroup, options: MegatronConfig) -> dict[str, Any]:
    """Return this rank's part of a batch that every rank of the group holds whole; it replaces Megatron's slicing:

        batch = shard_batch(batch, parallel_state.get_context_parallel_group(), options)
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    cu_seqlens describes packed documents. They may have any length and span ranks, and so may the row: where CP does
    not divide it, the first parts are one token longer. Several rows become one, as in Megatron's
    flatten_batch_for_packed_sequences. `packed_seq_params` then makes the model's argument.

    prompt_tree, (lengths, parents) or a Tree, says which segments of the row share their prefixes. mask, a value of
    `dfa_megatron.masks`, says any other pairs. All rows have the same. A tree makes position_ids, each token's place in
    its path; with a mask rotary embeddings follow the batch's own.

    Args:
        batch: tokens, labels, loss_mask, position_ids and the like, each (batch, seq, ...); None stays None.
            position_ids of multimodal rotary embeddings, (3, batch, seq), stay whole: Megatron's module makes the
            table of all tokens and slices it, and the layers exchange that slice. cu_seqlens and cu_seqlens_padded are
            int32 offsets into a row: (documents + 1) for one row, else (batch, documents + 1), the last offset repeated
            as padding. They and max_seqlen stay whole.
        cp_group: the context-parallel group; a group of one rank gets the batch unchanged.
        options: the options the model was built with. Layout contiguous slices in order; boundary and zigzag slice as
            Megatron's get_batch_on_this_cp_rank does.

    Raises:
        UnsupportedError: an attention_mask (attention is causal by construction), an entry without tokens, cu_seqlens
            of other rows, or a length of other rows that 2 x CP does not divide. Or the
            ranks hold different samples in the first batch of a group. Or a tree or a mask does not fit its rows.
    """
    _check_entries(batch)
    pairs = pairs_of(batch)
    layout = _DATA_LAYOUT[options.data_layout]
    slicing, ranks = _DECLARED.get(cp_group), dist.get_world_size(cp_group)
    is_first = slicing is None
    if slicing is None or slicing.order != layout:
        slicing = _DECLARED[cp_group] = _Slicing(layout, {})
    batch = _one_row(batch) if pairs is None else _with_positions(batch, pairs)
    rows = {name: x for name, x in batch.items() if x is not None and not _stays(name, x)}
    several = pairs is not None or ((ends := batch.get("cu_seqlens")) is not None and ends.numel() > 2)
    lengths = {x.shape[1] for x in rows.values()}
    if ranks > 1:
        again = lengths & {*(slicing.tokens or ())} - slicing.compared  # parts of earlier rows, perhaps
        slicing.compared |= again
        waits = is_first or (again and threading.current_thread() is threading.main_thread())
        if waits and options.verify == "on" and torch.utils.data.get_worker_info() is None:
            _compare(rows, cp_group, options)
        if odd := [n for n in lengths if n % (2 * ranks) and pairs is None and batch.get("cu_seqlens") is None]:
            raise UnsupportedError(
                f"a row of {odd[0]} tokens without cu_seqlens",
                f"Megatron cuts its tables of positions into 2 x CP = {2 * ranks} parts",
                "a length that 2 x CP divides, or packed documents: cu_seqlens (0, length) makes the row one",
            )
    slicing.add(lengths, ranks, plain=not several)
    cut = {name: shard_sequence(x, group=cp_group, layout=layout)[:] for name, x in rows.items()}
    for x in cut.values():
        setattr(x, _CUT, (ranks > 1, several))
    return {**batch, **cut}


def _check_entries(batch: Mapping[str, Any]) -> None:
    """Refuse entries that cannot be cut along their tokens."""
    if batch.get("attention_mask") is not None:
        raise UnsupportedError(
            "attention_mask in a batch",
            "attention is causal over the whole row, or over each document of cu_seqlens",
            "attention_mask=None (Megatron's scripts: --no-create-attention-mask-in-dataloader)",
        )
    for name, x in batch.items():
        if getattr(x, _CUT, (False,))[0]:
            raise UnsupportedError(
                f"the entry {name} of a batch that `shard_batch` has cut",
                "each rank would keep a part of its own part",
                "shard_batch once for each batch, in the loader or in the loop",
            )
        if x is not None and name not in _WHOLE and not (isinstance(x, torch.Tensor) and x.dim() >= 2):
            form = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise UnsupportedError(
                f"the entry {name} of a batch, {form}",
                "entries are cut along their tokens",
                "tensors (batch, seq, ...), and others apart from the batch",
            )


def pairs_of(batch: Mapping[str, Any]) -> Tree | Mask | None:
    """Return the prompt_tree or the mask of a batch, None for documents and causal rows.

    Raises:
        UnsupportedError: it has several, or they are none.
    """
    tree, mask = batch.get("prompt_tree"), batch.get("mask")
    if len(given := [name for name in _PAIRS if batch.get(name) is not None]) > 1:
        raise UnsupportedError(
            f"{' beside '.join(given)} in a batch",
            "each says by itself which tokens attend to which",
            "documents as roots of the prompt_tree, or one dfa_megatron.masks.union of all as the mask",
        )
    if mask is not None and not isinstance(mask, Mask):
        raise UnsupportedError(
            f"the entry mask of a batch, {type(mask).__name__}",
            "it says which tokens of a whole row attend to which",
            "a value of dfa_megatron.masks; what the tokens count is loss_mask",
        )
    try:
        return mask if tree is None else Tree.of(tree)
    except ValueError as error:
        raise UnsupportedError(
            "a prompt_tree that is none", str(error), "(lengths, parents) of dfa_megatron.masks.prompt_tree"
        ) from error


def check_length(pairs: Tree | Mask, tokens: int) -> None:
    """Refuse a tree or a mask of other than the `tokens` of a whole row.

    Raises:
        UnsupportedError: says both numbers.
    """
    if pairs.length != tokens:
        raise UnsupportedError(
            f"a prompt_tree or mask of {pairs.length} tokens with rows of {tokens}",
            "it says of every token of a row which others it sees",
            "one of the whole row; padding may be a root segment of its own",
        )


def _with_positions(batch: Mapping[str, Any], pairs: Tree | Mask) -> dict[str, Any]:
    """Return a batch with the positions that its tree gives, or with those that came with its mask, whole.

    Raises:
        UnsupportedError: rows have other lengths than the tree or the mask, or their positions differ.
    """
    rows = next(x for name, x in batch.items() if x is not None and not _stays(name, x))
    check_length(pairs, rows.shape[1])
    positions = batch.get("position_ids")
    if positions is not None and _has_axes("position_ids", positions):
        return dict(batch)
    if isinstance(pairs, Tree):
        places = tree_positions(pairs.lengths, pairs.parents).to(rows.device)
        return {**batch, "prompt_tree": pairs, "position_ids": places.expand(rows.shape[:2])}
    if positions is None:
        return dict(batch)
    if bool((positions != positions[:1]).any()):
        raise UnsupportedError(
            "position_ids that differ between rows of one mask", "Megatron rotates all rows alike", "a row each"
        )
    return {**batch, "mask_positions": positions[0]}


def _compare(rows: Mapping[str, torch.Tensor], cp_group: dist.ProcessGroup, options: MegatronConfig) -> None:
    """Refuse other samples on other ranks; collective, once a group: a sampler errs in its first batch already."""
    from dfa_megatron.runtime.comm.groups import channel_of

    digest = hashlib.sha256()
    for name, x in sorted(rows.items()):
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    over = channel_of(cp_group, verify=options.verify == "on")
    assert over is not None, "several ranks"
    with over.calls.preparing():
        everyone = over.exchange({"batch": digest.hexdigest()}, "compare the first batch")
    if len({theirs["batch"] for theirs in everyone}) > 1:
        raise UnsupportedError(
            "different samples on the ranks of a context-parallel group",
            "each rank would hold a part of another sequence",
            "the same whole batch on all of them, cut once: a sampler that counts data-parallel ranks alone",
        )


def check_positions(cp_group: dist.ProcessGroup, layout_option: str, positions: torch.Tensor) -> None:
    """Refuse positions (batch, tokens) of a whole batch, where a rank's own would be two pieces of them.

    Only where nobody has declared how batches are sliced: `shard_batch` knows their lengths.

    Raises:
        UnsupportedError: they count from 0 to this rank's tokens.
    """
    assumed = layout_option != "contiguous" and dist.get_world_size(cp_group) > 1 and cp_group not in _DECLARED
    if assumed:
        whole = torch.arange(positions.shape[1], device=positions.device)
        if bool((positions == whole).all()):
            raise UnsupportedError(
                f"position_ids that count from 0 to {positions.shape[1]} on a rank, in layout {layout_option!r}",
                "nobody cut the batch, and each rank would take the whole of it for its own part; or they are not the "
                "cut positions of the tokens",
                "get_batch_on_this_cp_rank or shard_batch for every entry of every batch; or declare_batch_layout "
                "where your own code slices",
            )


def _stays(name: str, x: torch.Tensor) -> bool:
    """Return whether an entry stays whole: of documents, or a time, a height and a width of every token."""
    return name in _WHOLE or _has_axes(name, x)


def _has_axes(name: str, x: torch.Tensor) -> bool:
    return name == "position_ids" and x.dim() == 3


def _one_row(batch: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor | None]:
    """Return packed documents of several rows as documents of a single row."""
    rows = next((x for name, x in batch.items() if x is not None and not _stays(name, x)), None)
    if batch.get("cu_seqlens") is None or rows is None or rows.shape[0] == 1:
        return batch
    one = {name: x if x is None or _stays(name, x) else x.flatten(0, 1)[None] for name, x in batch.items()}
    if (positions := batch.get("position_ids")) is not None and _has_axes("position_ids", positions):
        one["position_ids"] = positions.flatten(1, 2)[:, None]
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if (offsets := batch.get(name)) is not None:
            if offsets.dim() != 2 or offsets.shape[0] != rows.shape[0]:
                raise UnsupportedError(
                    f"cu_seqlens of shape {tuple(offsets.shape)} with {rows.shape[0]} rows",
                    "it holds offsets into each row",
                    f"({rows.shape[0]}, documents + 1)",
                )
            starts = torch.arange(rows.shape[0], device=offsets.device, dtype=offsets.dtype) * rows.shape[1]
            one[name] = torch.unique_consecutive(offsets + starts[:, None])[None]
    if (longest := batch.get("max_seqlen")) is not None:
        one["max_seqlen"] = longest.max()[None]
    return one


def declare_batch_layout(cp_group: dist.ProcessGroup, layout: str) -> None:
    """Declare how this process slices batches over a context-parallel group: "contiguous" or "zigzag".

    `shard_batch` declares its own batches. Call this only if your own code slices. A model cannot tell contiguous
    tokens from zigzag ones, so in layout `contiguous` it refuses to run on undeclared batches. Where only `shard_batch`
    slices, it refuses batches of other lengths too, because nobody cut them.
    """
    if layout not in ("contiguous", "zigzag"):
        raise UnsupportedError(f"the batch layout {layout!r}", "there is no such layout", "contiguous or zigzag")
    _DECLARED[cp_group] = _Slicing(layout, None)


def cuts_documents(cp_group: dist.ProcessGroup) -> bool:
    """Return whether undeclared packs of a group count as cut zigzag document by document, as by TransformerEngine."""
    return dist.get_world_size(cp_group) > 1 and cp_group not in _DECLARED and packing_of_script() != "rows"


def check_described(cp_group: dist.ProcessGroup, tokens: int, given: Iterable[Any]) -> None:
    """Refuse a call without packed_seq_params on a rank's `tokens`, where `shard_batch` was told of documents.

    It is known by a tensor among those `given`; by the tokens where all rows so long had documents.
    """
    lengths = getattr(_DECLARED.get(cp_group), "tokens", None) or {}
    if lengths.get(tokens) is False or any(getattr(x, _CUT, (False, False))[1] for x in given):
        raise UnsupportedError(
            f"a call without packed_seq_params on {tokens} tokens that `shard_batch` cut from a row with documents",
            "every token would attend to all before it, in other documents too",
            "packed_seq_params=packed_seq_params(batch), or a batch without cu_seqlens, prompt_tree and mask",
        )


def check_declared(
    cp_group: dist.ProcessGroup, layout_option: str, tokens: int, *, packed: bool = False, ours: bool = False
) -> None:
    """Refuse tokens in another order than the layers expect; undeclared batches count as Megatron's zigzag.

    Undeclared packed batches count as zigzag in every document, unless the script's flags slice whole rows.

    Args:
        tokens: of this rank.
        packed: there are documents.
        ours: `packed_seq_params` made them, so `shard_batch` cut them.

    Raises:
        UnsupportedError: the batches are sliced for another layout, or this one is not sliced at all.
    """
    if dist.get_world_size(cp_group) == 1:
        return
    slicing = _DECLARED.get(cp_group) or _Slicing("zigzag", None)
    if slicing.order != _DATA_LAYOUT[layout_option]:
        known = f"are sliced {slicing.order}" if cp_group in _DECLARED else "nobody is known to have cut in order"
        raise UnsupportedError(
            f"data_layout={layout_option!r} on batches that {known}",
            "the layers would mistake the order of the tokens",
            "dfa_megatron.megatron.shard_batch with the model's options, declare_batch_layout where your own code "
            "slices, or data_layout='boundary' for Megatron's own batches",
        )
    if slicing.tokens and tokens not in slicing.tokens:
        raise UnsupportedError(
            f"a batch of {tokens} tokens on a rank that `shard_batch` did not cut",
            "each rank would take the whole of it for its own part of a longer sequence",
            "shard_batch for every batch, of evaluation too; or declare_batch_layout where your own code slices",
        )
    if packed and slicing.tokens is not None and not ours and packing_of_script() != "rows":
        raise UnsupportedError(
            "documents that `packed_seq_params` did not make, after batches that `shard_batch` cut",
            "a trainer's own packs are cut document by document, and would be read as a row that was cut whole",
            "packed_seq_params(batch) of the batch that shard_batch cut; or no shard_batch in this process, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code slices whole rows",
        )
    if packed and layout_option != "boundary" and cuts_documents(cp_group):
        raise UnsupportedError(
            f"packed documents in data_layout={layout_option!r} that nobody is known to have sliced by rows",
            "Megatron slices them one by one, each in zigzag order, with TransformerEngine's help",
            "--dfa-data-layout boundary, dfa_megatron.megatron.shard_batch with the model's options, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code slices whole rows",
        )
