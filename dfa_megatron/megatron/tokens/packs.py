"""Read and check Megatron's packed documents (PackedSeqParams, THD), and the ranks that a micro-batch names itself.

Megatron's documents need lengths that are multiples of 2 x CP. Here they have any length: Megatron's attention receives
an ordinary sequence of one row and no PackedSeqParams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.cuts import cuts_documents
from dfa_megatron.plan.language.layout import Layout, zigzag_documents
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets, describe, offsets_of

_READ = "_dfa_pack"
"""The attributes, by `ranks`, of a PackedSeqParams that hold what was made of it while the micro-batch lives."""

_BELONGS = 512
"""Padding of so many tokens at most is part of its document; longer padding is documents of so many."""

_ALONE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""The group of this rank alone, by the default group under which it was made."""


@dataclass(eq=False)
class Pack:
    """Describe who attends to whom in a micro-batch to the modules of the layers, beside Megatron's own arguments."""

    offsets: Offsets
    """Global token offsets of the documents, without empty ones; of a tree's segments; of a mask's whole row."""
    pairs: Tree | Mask | None = None
    """The tree or the mask; None: a token of a document sees those before it."""
    places: torch.Tensor | None = None
    """Of every token in its path, or the caller's with a mask, int64 (all tokens,); None: they count in documents."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the micro-batch; None: the model's context-parallel group."""
    padded: Offsets = ()
    """Of the documents with their padding, each of which was cut zigzag by itself; () where rows were cut."""
    samples: int = 1
    """The rows of a batch that `shard_batch` made one."""

    @cached_property
    def longest(self) -> int:
        """Return how many rows a rotary table needs."""
        return max(hi - lo for lo, hi in pairwise(self.offsets)) if self.places is None else int(self.places.max()) + 1

    def layout(self, group: dist.ProcessGroup) -> str | Layout:
        """Return how the ranks share the tokens outside of a model, in layout `boundary`."""
        return _by_documents(self.padded, group.size()) if self.padded else "zigzag"

    def is_cut_by_documents(self, group: dist.ProcessGroup) -> bool:
        """Return whether every document was cut by itself among the ranks of `group`, which share the micro-batch.

        One document with a group of its own is cut in the same way by rows.
        """
        alone = self.group is not None and len(self.offsets) == 2
        return not alone and self.pairs is None and cuts_documents(group)


@lru_cache(maxsize=16)
def _by_documents(padded: Offsets, ranks: int) -> Layout:
    return zigzag_documents(padded, ranks)


@dataclass
class BatchParams(PackedSeqParams):  # type: ignore[misc,unused-ignore]
    """Hold Megatron's description of a batch that `shard_batch` cut."""

    pack: Any = None
    """The `Pack`."""


def group_of(params: Any) -> dist.ProcessGroup | None:
    """Return the process group that a PackedSeqParams names, or None for the model's context-parallel group.

    local_cp_size=1 without cp_group is this rank alone, as in Megatron.
    """
    group, size = params.cp_group, params.local_cp_size
    if group is None and size in (None, 1):
        return None if size is None else _alone()
    holds = group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and dist.get_rank(group) >= 0
    if not holds or size not in (None, group.size()):
        ranks = "no cp_group" if group is None else f"a cp_group of {group.size()} ranks" if holds else "that of others"
        raise UnsupportedError(
            f"packed_seq_params with local_cp_size={size} and {ranks}",
            "the ranks that share the micro-batch are unknown, or this rank has none of its tokens",
            "the group of this rank with local_cp_size ranks; without one, local_cp_size=1",
        )
    return group  # type: ignore[no-any-return]


def _alone() -> dist.ProcessGroup:
    """Return the group of this rank; made once, without the other ranks."""
    whole = dist.group.WORLD
    assert whole is not None, "Megatron runs on process groups"
    if whole not in _ALONE:
        _ALONE[whole] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _ALONE[whole]


def read_pack(params: Any, ranks: int = 0) -> Pack:
    """Return the documents of a PackedSeqParams, the same object while it holds the same.

    Padding at a document's end (cu_seqlens_q_padded) counts as part of the document: under a causal mask no real token
    attends to it, and it has no loss.

    Args:
        params: a PackedSeqParams in format thd with offsets of whole documents, before any slicing.
        ranks: of context parallelism, if each document was cut by itself. 0: rows were cut.
    """
    if isinstance(params, BatchParams) and not ranks:
        pack: Pack = params.pack
        return pack
    group = group_of(params)
    queries, keys = (
        cumulative if padded is None else padded
        for cumulative, padded in (
            (params.cu_seqlens_q, params.cu_seqlens_q_padded),
            (params.cu_seqlens_kv, params.cu_seqlens_kv_padded),
        )
    )
    offsets = () if queries is None else documents_of(queries)
    if not offsets or keys is None or (keys is not queries and _without_empty(keys) != offsets):
        raise UnsupportedError(
            "packed_seq_params without cu_seqlens_q, or with a cu_seqlens_kv other than that",
            "queries and keys must come from the same documents",
            "the same for both",
        )
    one = group is not None and len(offsets) == 2
    if params.qkv_format != "thd" and not (one and params.qkv_format == "sbhd"):
        raise UnsupportedError(
            f"packed_seq_params in format {params.qkv_format!r}",
            "every pack is one row of tokens",
            "format 'thd'; 'sbhd' is for one document with a cp_group of its own",
        )
    padded: Offsets = ()
    if ranks:
        if (mode := getattr(params, "cp_partition_mode", None)) not in (None, "zigzag"):
            raise UnsupportedError(
                f"packed_seq_params with cp_partition_mode={mode!r} that nobody is known to have sliced",
                "documents are taken as cut zigzag one by one",
                "cp_partition_mode='zigzag'",
            )
        padded = offsets
        offsets = with_long_padding_apart(offsets_of(params.cu_seqlens_q), offsets_of(queries), ranks)
    kept = f"{_READ}_{ranks}"
    known: Pack | None = getattr(params, kept, None)
    if known is None or (known.offsets, known.group, known.padded) != (offsets, group, padded):
        known = Pack(offsets, group=group, padded=padded)
        setattr(params, kept, known)
    return known


@lru_cache(maxsize=64)
def with_long_padding_apart(real: Offsets, padded: Offsets, ranks: int) -> Offsets:
    """Return the documents of a pack that `ranks` ranks cut zigzag one by one; trainers fill packs by long padding."""
    lengths, rooms = ([hi - lo for lo, hi in pairwise(offsets)] for offsets in (real, padded))
    if len(real) != len(padded) or not all(0 <= length <= room for length, room in zip(lengths, rooms, strict=True)):
        raise UnsupportedError(
            f"packed_seq_params with and without padding: {describe(real)} and {describe(padded)}",
            "every document must fit its padded length",
            "as many offsets in both, with no document longer than it is padded",
        )
    if uneven := next((room for room in rooms if room % (2 * ranks)), None):
        raise UnsupportedError(
            f"a document of {uneven} tokens, padding included, cut zigzag by itself",
            f"its length must be a multiple of 2 x CP = {2 * ranks}",
            "cu_seqlens_q_padded; or declare_batch_layout(cp_group, 'zigzag') where whole rows are cut",
        )
    ends = {*padded}
    for lo, hi, length in zip(padded, padded[1:], lengths, strict=False):
        if hi - lo - length > _BELONGS:
            ends.update(range(lo + length, hi, _BELONGS))
    return tuple(sorted(ends))


def check_samples(config: Any, params: Any, pack: Pack) -> None:
    """Refuse a router's loss per sample if several samples of a micro-batch form one pack."""
    kinds, sample = getattr(config, "moe_router_load_balancing_type", None), getattr(params, "tokens_per_sample", None)
    samples = pack.samples if sample is None else pack.offsets[-1] // sample
    if samples > 1 and "seq_aux_loss" in (kinds or ()):
        what = f"moe_router_load_balancing_type={kinds!r} with {samples} samples in a pack"
        works = "--micro-batch-size 1, or --moe-router-load-balancing-type aux_loss"
        raise UnsupportedError(what, "the loss is of each sample, of which a rank does not hold all tokens", works)


def documents_of(cu_seqlens: Any) -> Offsets:
    """Return the offsets of documents of at least one token."""
    offsets = _without_empty(cu_seqlens)
    check_offsets(offsets)
    return offsets


def _without_empty(cu_seqlens: Any) -> Offsets:
    """Return the offsets without empty documents; Megatron's datasets repeat the last offset as padding."""
    return tuple(offset for offset, _ in groupby(offsets_of(cu_seqlens)))
