"""Who attends to whom in the harness's micro-batches: documents, trees, masks; and what one rank makes of each."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from dfa_megatron import masks
from dfa_megatron.masks import Mask, Span, Tile
from dfa_megatron.megatron.tokens.batch import pairs_of
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import positions_of

SEQUENCE, BATCH = 48, 2


def positions(layout: str, length: int, ranks: int, rank: int) -> torch.Tensor:
    """The places of a rank's tokens in a row, int64 (local tokens,)."""
    return positions_of(by_name(layout, length, ranks), rank)


def entries(kind: str, step: int, micro: int) -> dict[str, Any]:
    """What a case adds to a micro-batch: nothing, "documents", a "tree", or a "mask" with its positions."""
    draw = random.Random(100 * step + micro)
    if kind == "tree":
        tree = forest(draw)
        return {"prompt_tree": tree if micro else (list(tree.lengths), torch.tensor(tree.parents))}
    if kind == "mask":
        mask, positions = masked(draw, 2 * step + micro)
        return {"mask": mask, "position_ids": positions.expand(BATCH, -1).contiguous()}
    return {"cu_seqlens": documents(step, micro)} if kind else {}


def documents(step: int, micro: int) -> torch.Tensor:
    """Offsets of the documents of every row, int32 (batch, n): of any length, the last repeated as Megatron does it."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = []
    for _ in range(BATCH):
        inner = torch.randperm(SEQUENCE - 1, generator=generator)[:4] + 1
        rows.append(torch.cat((torch.tensor([0]), inner.sort().values, torch.tensor([SEQUENCE] * 3))))
    rows[-1][2] = rows[-1][1] + 1  # a document of one token; with another one it may leave an empty document
    return torch.stack([row.sort().values for row in rows]).int()


def bands(draw: random.Random, length: int = SEQUENCE) -> Mask:
    """Any bands, and each token itself."""
    spans, whole = [sorted(draw.choices(range(length + 1), k=4)) for _ in range(5)], Span(0, length)
    tiles = [Tile(Span(a, d), Span(b, c), draw.randint(-30, 0), draw.randint(0, 30)) for a, b, c, d in spans]
    return masks.union(f"bands {spans}", length, [*tiles, Tile(whole, whole, 0, 0)])


def forest(draw: random.Random, length: int = SEQUENCE) -> Tree:
    """Random trees: segments of one token and more, branches of any depth."""
    segments = min(9, length)
    cuts = [0, *sorted(draw.sample(range(1, length), segments - 1)), length]
    parents: list[int] = []
    for at in range(segments):
        above, fits = at - 1, [-1]
        while above >= 0:
            fits.append(above)
            above = parents[above]
        parents.append(draw.choice(fits))
    return Tree(tuple(hi - lo for lo, hi in pairwise(cuts)), tuple(parents))


def masked(draw: random.Random, which: int) -> tuple[Mask, torch.Tensor]:
    """A mask that users ask for, and the positions of its tokens."""
    half, rows = SEQUENCE // 2, torch.arange(SEQUENCE)
    cut = draw.randint(5, half)
    if which % 4 == 0:  # block diffusion: noised blocks see themselves, and the clean ones before them
        size, tiles = draw.choice((3, 4, 6)), [Tile(Span(half, SEQUENCE), Span(half, SEQUENCE), hi=0)]
        for lo in range(0, half, size):
            noised = Span(lo, lo + size)
            tiles += [Tile(noised, noised), Tile(noised, Span(half, half + lo))] if lo else [Tile(noised, noised)]
        return masks.union("block diffusion", SEQUENCE, tiles), rows % half
    if which % 4 == 1:  # images that see themselves
        return masks.two_way_blocks((cut, SEQUENCE - cut), [(1, 4), (cut, cut + 7)]), rows
    if which % 4 == 2:
        return bands(draw), rows + 3
    return masks.prefix_lm_documents((cut, SEQUENCE - cut), (4, 9)), rows


def alone(batch: dict[str, Any], model: Any) -> torch.Tensor:
    """The losses (batch, tokens) of a model of one rank with Megatron's own attention."""
    if "prompt_tree" in batch:
        return by_paths(batch, model)
    return under_mask(batch, model) if "mask" in batch else one_by_one(batch, model)


def hidden_above(length: int) -> torch.Tensor:
    """Megatron's causal attention_mask: True is hidden."""
    return torch.triu(torch.ones(1, 1, length, length), 1).bool()


def one_by_one(batch: dict[str, torch.Tensor], model: Any) -> torch.Tensor:
    """The output for packed documents, (batch, sequence), of a model that sees one at a time."""
    parts = []
    for row, offsets in enumerate(batch["cu_seqlens"].tolist()):
        for lo, hi in pairwise(offsets):
            if hi > lo:
                part = {name: batch[name][row : row + 1, lo:hi] for name in ("tokens", "labels")}
                positions = torch.arange(hi - lo)[None]
                parts.append(model(part["tokens"], positions, hidden_above(hi - lo), labels=part["labels"]).flatten())
    return torch.cat(parts).view_as(batch["tokens"])


def by_paths(batch: dict[str, Any], model: Any) -> torch.Tensor:
    """The output for a tree of a model that sees each path to a leaf by itself; a token's is its first's."""
    tree = pairs_of(batch)
    assert isinstance(tree, Tree)
    found: list[torch.Tensor | None] = [None] * tree.length
    for leaf in set(range(len(tree.parents))) - set(tree.parents):
        path, above = list[int](), leaf
        while above >= 0:
            path[:0] = range(tree.spans[above].lo, tree.spans[above].hi)
            above = tree.parents[above]
        tokens, labels = (batch[name][:, path] for name in ("tokens", "labels"))
        losses = model(tokens, torch.arange(len(path))[None], hidden_above(len(path)), labels=labels)
        for at, loss in zip(path, losses.T, strict=True):
            found[at] = loss if found[at] is None else found[at]
    return torch.stack([loss for loss in found if loss is not None], 1)


def under_mask(batch: dict[str, Any], model: Any, **more: Any) -> torch.Tensor:
    """The output of a model that is told every pair, (batch, sequence); its rotary table has the rows of the tokens."""
    pairs, positions = pairs_of(batch), batch["position_ids"]
    assert pairs is not None
    hidden = ~seen(pairs.mask() if isinstance(pairs, Tree) else pairs)
    rotary = getattr(getattr(model, "module", model), "rotary_pos_emb", torch.nn.Identity())  # of learned positions
    rows = None if type(rotary) is torch.nn.Identity else rotary(int(positions.max()) + 1)[positions[0]]
    with patch.object(rotary, "forward", lambda *_, **__: rows):
        out: torch.Tensor = model(batch["tokens"], positions, hidden, labels=batch["labels"], **more)
    return out


def seen(mask: Mask) -> torch.Tensor:
    """The pairs that attend, (1, 1, tokens, tokens)."""
    pairs = torch.zeros(mask.length, mask.length, dtype=torch.bool)
    for tile in mask.tiles:
        q, k = torch.arange(tile.q.lo, tile.q.hi)[:, None], torch.arange(tile.kv.lo, tile.kv.hi)
        pairs[tile.q.lo : tile.q.hi, tile.kv.lo : tile.kv.hi] |= (k - q >= tile.lo) & (k - q <= tile.hi)
    return pairs[None, None]
