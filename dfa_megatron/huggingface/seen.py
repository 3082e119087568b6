"""What the tokens of whole rows see: causal documents, the segments of a prompt tree, or any mask.

A batch tells them by positions, where 0 starts a document, by offsets, or under a key. They are read once per forward,
as Python numbers. A layer gets them cut by its window, by its chunks, and with the images in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.mask import Mask, short_name, two_way_blocks
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.cu_seqlens import Offsets
from dfa_megatron.whole_batch import MASK, check_length, pairs_of

FLASH_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""The keys by which transformers' collators describe packed documents, with or without position_ids."""

Documents = tuple[Offsets, ...]
"""The token offsets of the documents of every row: 0, ..., the row's length."""

Images = tuple[tuple[int, int], ...]
"""The first token of each image and the one behind its last, in the sequence of all ranks, of one row."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Hold what every row of a batch sees, and where its tokens stand.

    told: as the batch tells it.
    runs: of every run whose positions go up by 1 the first token, the one behind the last, and the first's position.
    """

    told: Tree | Mask
    runs: tuple[tuple[int, int, int], ...]

    def positions(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the position of every token, int64 (1, length)."""
        return torch.cat([torch.arange(at, at + hi - lo, device=device) for lo, hi, at in self.runs])[None]


def seen_of(told: Tree | Mask, positions: torch.Tensor | None = None) -> Seen:
    """Return a tree with the places in its paths, or a mask with positions (1, length); waits for their device."""
    if isinstance(told, Tree):
        return Seen(told, tuple((span.lo, span.hi, at) for span, at in zip(told.spans, told.places, strict=True)))
    if positions is None:
        return Seen(told, ((0, told.length, 0),))
    row = positions[0].cpu()
    starts = [0, *((row.diff() != 1).nonzero().flatten() + 1).tolist()]
    return Seen(told, tuple(zip(starts, [*starts[1:], told.length], row[starts].tolist(), strict=True)))


def seen_in(
    given: Mapping[str, Any], positions: torch.Tensor | None, rows: int, length: int
) -> Documents | Seen | None:
    """Return what whole rows see, None if each is one document.

    Args:
        given: a batch, which may tell a tree, a mask, or offsets of documents.
        positions: (batch or 1, seq) as the batch tells them; None without.
        rows, length: of the batch.
    """
    padding = given.get("attention_mask") if given.get(MASK) is not None else None
    hides = isinstance(padding, torch.Tensor) and not padding.all()  # what a mask may show to other tokens
    if (told := pairs_of({**given, "padding": hides or None}, *FLASH_KEYS, "padding")) is not None:
        check_length(told, length)
        seen = seen_of(told, positions)
        if positions is not None and not bool((positions == seen.positions(positions.device)).all()):
            refuse_positions(positions)
        return seen
    stated = _of_offsets(given, rows, length)
    found = None if positions is None else _of_positions(positions.expand(rows, -1))
    if stated is not None and found is not None and stated != found:
        what, why = "cu_seq_lens_q that disagree with position_ids", "they say where documents begin in two ways"
        raise UnsupportedError(what, why, "one of them")
    documents = found if stated is None else stated
    if documents is None or all(len(offsets) == 2 for offsets in documents):
        return None
    return documents


def _of_positions(positions: torch.Tensor) -> Documents:
    """Return the documents of rows (batch, seq), or refuse other positions; waits for the device once."""
    at = torch.arange(positions.shape[1], device=positions.device)
    starts = positions == 0
    begin = torch.where(starts, at, 0).cummax(1).values
    valid = starts[:, 0].all() & (positions == at - begin).all()
    seen = torch.cat((valid[None], starts.flatten())).cpu()
    if not bool(seen[0]):
        refuse_positions(positions)
    length: int = positions.shape[1]
    return tuple((*row.nonzero().flatten().tolist(), length) for row in seen[1:].view_as(starts))


def _of_offsets(given: Mapping[str, Any], batch: int, length: int) -> Documents | None:
    """Return the documents of rows from cu_seq_lens_q and the equal cu_seq_lens_k, (documents + 1); None without.

    Their offsets count through all rows.
    """
    queries, keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if queries is None and keys is None:
        return None
    offsets = _numbers(keys if queries is None else queries)
    both = keys is not None and queries is not None and keys is not queries
    if both and _numbers(keys) != offsets:
        what, why = "cu_seq_lens_k other than cu_seq_lens_q", "queries and keys must be of the same documents"
        raise UnsupportedError(what, why, "the same")
    ends = [row * length for row in range(batch + 1)]
    increasing = all(lo < hi for lo, hi in pairwise(offsets))
    if not offsets or offsets[0] or offsets[-1] != ends[-1] or not increasing or not {*ends} <= {*offsets}:
        ends_of = f"from {offsets[0]} to {offsets[-1]}" if offsets else "without any"
        raise UnsupportedError(
            f"cu_seq_lens_q {ends_of}",
            f"it must hold the offsets of documents in {batch} rows of {length} tokens, of the whole batch",
            "as transformers' padding-free collators make it of a whole batch, or position_ids",
        )
    return tuple(tuple(offset - lo for offset in offsets if lo <= offset <= hi) for lo, hi in pairwise(ends))


def _numbers(offsets: Any) -> Offsets:
    return tuple(offsets.flatten().tolist() if isinstance(offsets, torch.Tensor) else offsets)


def longest_of(seen: Documents | Seen | None, length: int) -> int:
    """Return the tokens of the longest document of rows of some length, or of the longest path."""
    if isinstance(seen, Seen):
        return max(at + hi - lo for lo, hi, at in seen.runs)
    return max(hi - lo for offsets in seen or ((0, length),) for lo, hi in pairwise(offsets))


def refuse_positions(given: torch.Tensor) -> NoReturn:
    """Refuse positions that are not those of the tokens of a batch."""
    flat = given.flatten()
    ends = f"from {int(flat[0])} to {int(flat[-1])}" if flat.numel() else "without a token"
    told = f"position_ids {ends} of shape {tuple(given.shape)}"
    raise UnsupportedError(
        "position_ids that are not those of documents, or of a tree, or the same in all rows of a mask",
        f"{told}: each document, and so each row, must begin at 0 and go up by 1",
        "as DataCollatorWithFlattening of transformers makes them for a whole batch, or none for one document a "
        "sequence; for models with axes (4, batch, seq), these first",
    )


def refuse_for(what: str) -> NoReturn:
    """Refuse a tree or a mask for a model, or for a layer."""
    raise UnsupportedError(
        f"a prompt_tree or a mask for {what}",
        "tokens of one path would be taken for those of another",
        "a distributed model of attention layers whose positions are counted from 0; or every path as a document",
    )


@lru_cache(maxsize=64)
def mask_of(row: Offsets | Seen, images: Images, left: int, chunk: int | None = None) -> Mask:
    """Return what the tokens of a row see in a layer, the same object each time.

    Args:
        row: the offsets of its documents, or the tree or mask that all rows have.
        images: tokens that see each other both ways too; one that reaches over two documents is one in each.
        left: a token sees this many positions before its own; -1 for all.
        chunk: a token sees the positions of its own chunk; None for no chunks.
    """
    if not isinstance(row, Seen):
        cuts = list(pairwise(row))
        within = [(max(lo, at), min(hi, end)) for at, end in cuts for lo, hi in images if lo < end and at < hi]
        return two_way_blocks([hi - lo for lo, hi in cuts], within, left)
    told = row.told
    mask = told.mask(left) if isinstance(told, Tree) else told
    if chunk or (left >= 0 and mask is told):
        mask = _near(row, mask, left, chunk)
    more = [Tile(Span(lo, hi), Span(lo, hi), lo=1).shrink() for lo, hi in images]
    tiles = (*mask.tiles, *(tile for tile in more if tile))
    return mask if tiles == mask.tiles else Mask(f"{mask.name} with images {_edges(images)}", mask.length, tiles)


def _near(seen: Seen, mask: Mask, left: int, chunk: int | None) -> Mask:
    """Return the pairs of a mask whose positions are near enough, or in one chunk."""
    runs = [(Span(lo, hi), at - lo, 0) for lo, hi, at in seen.runs]
    if chunk:
        runs = [
            (Span(max(span.lo, cut * chunk - shift), min(span.hi, (cut + 1) * chunk - shift)), shift, cut)
            for span, shift, _ in runs
            for cut in range((span.lo + shift) // chunk, (span.hi - 1 + shift) // chunk + 1)
        ]
    tiles = []
    for tile in mask.tiles:
        columns = [run for run in runs if tile.kv & run[0]]
        for q, q_shift, q_chunk in runs:
            for kv, kv_shift, kv_chunk in columns if tile.q & q else ():
                lo = tile.lo if left < 0 else max(tile.lo, q_shift - kv_shift - left)
                if q_chunk == kv_chunk and (part := tile._replace(lo=lo).restrict(q, kv)):
                    tiles.append(part)
    return Mask(f"{mask.name} near {left}, {chunk} in {_edges(seen.runs)}", mask.length, tuple(tiles))


def _edges(ranges: tuple[tuple[int, ...], ...]) -> str:
    return short_name([edge for each in ranges for edge in each])


def in_chunks(documents: Documents, chunk: int) -> Documents:
    """Return the documents cut every `chunk` tokens, each from its own start."""
    return tuple(
        (*(cut for lo, hi in pairwise(offsets) for cut in range(lo, hi, chunk)), offsets[-1]) for offsets in documents
    )
