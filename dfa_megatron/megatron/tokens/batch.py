"""Cut a whole batch over the context-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.cuts import DECLARED, DESCRIBED, OUTSIDE, Cuts
from dfa_megatron.megatron.tokens.packs import BatchParams, Pack, documents_of, group_of
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import shard_sequence, tree_positions
from dfa_megatron.whole_batch import MASK, TREE, check_length, check_same, pairs_of

_PACKS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")
_DESCRIBING = (TREE, MASK, "mask_positions", *_PACKS)
"""The entries of which packed_seq_params are made."""


def shard_batch(batch: Mapping[str, Any], cp_group: dist.ProcessGroup, options: MegatronConfig) -> dict[str, Any]:
    """Return what a model takes of a batch that every rank of the group holds whole; it replaces Megatron's slicing:

        losses = model(**shard_batch(batch, parallel_state.get_context_parallel_group(), options))

    cu_seqlens describes packed documents. They may have any length and span ranks, and so may the row: where CP does
    not divide it, the first parts are one token longer. Several rows become one, as in Megatron's
    flatten_batch_for_packed_sequences.

    prompt_tree, (lengths, parents) or a Tree, says which segments of the row share their prefixes. mask, a value of
    `dfa_megatron.masks`, says any other pairs. All rows have the same. A tree makes position_ids, each token's place in
    its path. With a mask rotary embeddings follow the batch's own, or mask_positions (all tokens,).

    Every stage of a pipeline needs the packed_seq_params. Of a batch without tokens only they are made.

    Args:
        batch: tokens, labels, loss_mask, position_ids and the like, each (batch, seq, ...); None stays None.
            position_ids of multimodal rotary embeddings, (3, batch, seq), stay whole. cu_seqlens and cu_seqlens_padded
            are int32 offsets into a row, best on the CPU: (documents + 1) for one row, else (batch, documents + 1), the
            last offset repeated as padding. local_cp_size and hybrid_cp_group, as Megatron's hybrid context parallelism
            adds them, name the micro-batch's own ranks.
        cp_group: the context-parallel group of the model.
        options: the options the model was built with. Layout contiguous cuts in order; boundary and zigzag cut as
            Megatron's get_batch_on_this_cp_rank does.

    Returns:
        input_ids, position_ids, attention_mask (None) and packed_seq_params (None for causal rows); and this rank's
        part of every other entry. Take out what the model does not take.

    Raises:
        UnsupportedError: an attention_mask (attention is causal by construction), an entry without tokens, cu_seqlens
            of other rows, or a length of other rows that 2 x CP does not divide. Or the ranks hold different samples in
            the first batch of a group, or the batch was cut before. Or a tree, a mask or a group does not fit.
    """
    _check_entries(batch)
    pairs = pairs_of(batch, "cu_seqlens")
    batch, samples = _one_row(batch) if pairs is None else (_with_positions(batch, pairs), 1)
    params = _params_of(batch, pairs)
    if params is not None:
        params.pack.samples = samples
        cp_group = params.pack.group or cp_group
    rows = {name: x for name, x in batch.items() if x is not None and not _stays(name, x)}
    if not rows:
        return {"packed_seq_params": params}
    layout, ranks = OUTSIDE[options.data_layout], cp_group.size()
    cuts = DECLARED.get(cp_group)
    is_first = cuts is None
    if cuts is None or cuts.layout != layout:
        cuts = DECLARED[cp_group] = Cuts(layout, {})
    lengths = {x.shape[1] for x in rows.values()}
    if ranks > 1:
        if is_first and options.verify == "on" and torch.utils.data.get_worker_info() is None:
            check_same(cp_group, rows, "a sampler that counts data-parallel ranks alone")
        if odd := [length for length in lengths if length % (2 * ranks) and params is None]:
            why = f"ranks hold equal parts of it, in layout zigzag of two of 2 x CP = {2 * ranks} chunks"
            works = "a length that 2 x CP divides, or packed documents: cu_seqlens (0, length) makes the row one"
            raise UnsupportedError(f"a row of {odd[0]} tokens without cu_seqlens", why, works)
    described = params is not None and (params.pack.pairs is not None or len(params.pack.offsets) > 2)
    if cuts.tokens is not None:
        held = {by_name(layout, length, ranks).tokens(rank) for length in lengths for rank in range(ranks)}
        cuts.tokens |= {tokens: cuts.tokens.get(tokens, True) and described for tokens in held}
    cut = {name: shard_sequence(x, group=cp_group, layout=layout)[:] for name, x in rows.items()}
    for x in cut.values():
        setattr(x, DESCRIBED, described)
    given = {name: x for name, x in {**batch, **cut}.items() if name not in _DESCRIBING}
    if "tokens" in given:
        given["input_ids"] = given.pop("tokens")
    return {"position_ids": None, **given, "attention_mask": None, "packed_seq_params": params}


def _check_entries(batch: Mapping[str, Any]) -> None:
    """Refuse entries that cannot be cut along their tokens, and those of a batch that was cut."""
    if batch.get("attention_mask") is not None:
        raise UnsupportedError(
            "attention_mask in a batch",
            "attention is causal over the whole row, or over each document of cu_seqlens",
            "attention_mask=None (Megatron's scripts: --no-create-attention-mask-in-dataloader)",
        )
    if "packed_seq_params" in batch or any(hasattr(x, DESCRIBED) for x in batch.values()):
        raise UnsupportedError(
            "a batch that `shard_batch` has cut",
            "each rank would keep a part of its own part",
            "shard_batch once for each batch, in the loader or in the loop",
        )
    for name, x in batch.items():
        if x is not None and name not in _DESCRIBING and not (isinstance(x, torch.Tensor) and x.dim() >= 2):
            form = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise UnsupportedError(
                f"the entry {name} of a batch, {form}",
                "entries are cut along their tokens",
                "tensors (batch, seq, ...), and others apart from the batch",
            )


def _with_positions(batch: Mapping[str, Any], pairs: Tree | Mask) -> dict[str, Any]:
    """Return a batch with the positions that its tree gives, or with those that came with its mask, whole."""
    rows = next((x for name, x in batch.items() if x is not None and not _stays(name, x)), None)
    positions = batch.get("position_ids")
    if rows is None:
        return dict(batch)
    check_length(pairs, rows.shape[1])
    if positions is not None and _has_axes("position_ids", positions):
        return dict(batch)
    if isinstance(pairs, Tree):
        places = tree_positions(pairs.lengths, pairs.parents).to(rows.device)
        return {**batch, "position_ids": places.expand(rows.shape[:2])}
    if positions is None:
        return dict(batch)
    if bool((positions != positions[:1]).any()):
        raise UnsupportedError(
            "position_ids that differ between rows of one mask", "Megatron rotates all rows alike", "a row each"
        )
    return {**batch, "mask_positions": positions[0]}


def _params_of(batch: Mapping[str, Any], pairs: Tree | Mask | None) -> BatchParams | None:
    """Return Megatron's description of a batch of one row, None for causal rows.

    With a tree or a mask it has no cu_seqlens: attention of others fails rather than mistake the row for a document.
    """
    ends = batch.get("cu_seqlens") if batch.get("cu_seqlens_padded") is None else batch["cu_seqlens_padded"]
    size, group = batch.get("local_cp_size"), batch.get("hybrid_cp_group")
    if pairs is None and ends is None:
        if size is None and group is None:
            return None
        raise UnsupportedError(
            "local_cp_size or hybrid_cp_group in a batch without cu_seqlens",
            "only a pack may be shared by other ranks than the model's",
            "cu_seqlens; (0, length) makes a row one document",
        )
    params = BatchParams("thd", local_cp_size=None if size is None else int(size), cp_group=group)
    group = group_of(params)
    if ends is not None:
        ends = ends[0] if ends.dim() == 2 else ends
        params.cu_seqlens_q = params.cu_seqlens_kv = ends
        params.pack = Pack(documents_of(ends), group=group)
    else:
        tree = pairs if isinstance(pairs, Tree) else Tree((pairs.length,), (-1,))  # type: ignore[union-attr]
        given = None if tree is pairs else batch.get("mask_positions")
        places = tree_positions(tree.lengths, tree.parents) if given is None else given
        params.pack = Pack((0, *accumulate(tree.lengths)), pairs, places, group=group)
    params.max_seqlen_q = params.max_seqlen_kv = params.pack.longest
    return params


def _stays(name: str, x: torch.Tensor) -> bool:
    """Return whether an entry stays whole: of documents, or a time, a height and a width of every token."""
    return name in _DESCRIBING or _has_axes(name, x)


def _has_axes(name: str, x: torch.Tensor) -> bool:
    return name == "position_ids" and x.dim() == 3


def _one_row(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return packed documents of several rows as documents of a single row, and of how many rows."""
    rows = next((x.shape[:2] for name, x in batch.items() if x is not None and not _stays(name, x)), None)
    if (ends := batch.get("cu_seqlens")) is not None and rows is None and ends.dim() == 2:  # a stage without tokens
        rows = len(ends), int(ends[0, -1])
    if ends is None or rows is None or rows[0] == 1:
        return batch, 1
    count, length = rows
    one = {name: x if x is None or _stays(name, x) else x.flatten(0, 1)[None] for name, x in batch.items()}
    if (positions := batch.get("position_ids")) is not None and _has_axes("position_ids", positions):
        one["position_ids"] = positions.flatten(1, 2)[:, None]
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if (offsets := batch.get(name)) is not None:
            if offsets.dim() != 2 or offsets.shape[0] != count:
                what = f"cu_seqlens of shape {tuple(offsets.shape)} with {count} rows"
                raise UnsupportedError(what, "it holds offsets into each row", f"({count}, documents + 1)")
            starts = torch.arange(count, device=offsets.device, dtype=offsets.dtype) * length
            one[name] = torch.unique_consecutive(offsets + starts[:, None])[None]
    return one, count
