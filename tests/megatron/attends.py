"""Trees and masks that tokens attend by, and what a model of one rank makes of them."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from dfa_megatron.masks import Mask
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import positions_of
from dfa_megatron.whole_batch import pairs_of
from tests.fuzz.frameworks.uneven import cells
from tests.support.plan_cases import heterogeneous_masks, some_parents


def positions(layout: str, length: int, ranks: int, rank: int) -> torch.Tensor:
    """The places of a rank's tokens in a row, int64 (local tokens,)."""
    return positions_of(by_name(layout, length, ranks), rank)


def forest(draw: random.Random, length: int) -> Tree:
    """Random trees: segments of one token and more, branches of any depth."""
    cuts = [0, *sorted(draw.sample(range(1, length), min(8, length - 1))), length]
    return Tree(tuple(hi - lo for lo, hi in pairwise(cuts)), tuple(some_parents(len(cuts) - 1, draw)))


def masked(draw: random.Random, length: int) -> tuple[Mask, torch.Tensor]:
    """A mask that users ask for, and the positions of its tokens (length,): in order, or of two streams."""
    every = [case.mask for case in heterogeneous_masks(length, draw) if case.sees_itself]
    rows = torch.arange(length)
    return draw.choice(every), draw.choice((rows + draw.randint(0, 9), rows % -(-length // 2)))


def image_places(rows: int, length: int) -> torch.Tensor:
    """A time, a height and a width of each token, (3, rows, length): text around an image of 4 x 6 tokens."""
    found = []
    for row in range(rows):
        start = (10, 3)[row % 2]
        image = torch.stack((torch.zeros(24), torch.arange(24) // 6, torch.arange(24) % 6)) + start
        before, after = torch.arange(start), torch.arange(length - start - 24) + start + 6
        found.append(torch.cat((before.expand(3, -1), image, after.expand(3, -1)), dim=1))
    return torch.stack(found, dim=1).long()


def hidden_above(length: int) -> torch.Tensor:
    """Megatron's causal attention_mask: True is hidden."""
    return torch.triu(torch.ones(1, 1, length, length), 1).bool()


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
    hidden = ~cells(pairs.mask() if isinstance(pairs, Tree) else pairs)[None, None]
    rotary = getattr(getattr(model, "module", model), "rotary_pos_emb", torch.nn.Identity())  # of learned positions
    known = type(rotary) is torch.nn.Identity or positions.dim() == 3  # of images, which Megatron takes as they are
    rows = None if known else rotary(int(positions.max()) + 1)[positions[0]]
    with contextlib.nullcontext() if known else patch.object(rotary, "forward", lambda *_, **__: rows):
        out: torch.Tensor = model(batch["tokens"], positions, hidden, labels=batch["labels"], **more)
    return out
