"""Prompt trees: a batch tells the segments of its rows under one key, and layers get them in place of documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dfa_megatron.huggingface.refusals import BATCHES
from dfa_megatron.plan.language.mask import Mask, prompt_tree
from dfa_megatron.sharding import tree_positions

KEY = "prompt_tree"
"""The key of a batch, and of a call, for the lengths and the parents of the segments."""

_mask = lru_cache(maxsize=64)(prompt_tree)  # the same object for all layers


@dataclass(frozen=True, slots=True)
class Tree:
    """The segments of every row of a batch, as `masks.prompt_tree` takes them."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def mask(self) -> Mask:
        """Return the pairs that attend."""
        return _mask(self.lengths, self.parents)

    def positions(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the place of every token in its path, int64 (1, length)."""
        return tree_positions(self.lengths, self.parents, device=device)[None]


def tree_of(given: Any, length: int, beside: list[str]) -> Tree:
    """Return the segments that a batch or a call tells.

    Args:
        given: (lengths, parents).
        length: the tokens of a row on all ranks.
        beside: other keys that say which tokens attend to which.

    Raises:
        UnsupportedError: there are such keys, or the segments are no trees of that many tokens.
    """
    BATCHES.check(beside_tree=", ".join(beside))
    lengths, parents = (tuple(int(number) for number in numbers) for numbers in given)
    tree, wrong = Tree(lengths, parents), ""
    try:
        if tree.mask.length != length:
            wrong = f"they have {tree.mask.length} tokens, and a row has {length}"
    except ValueError as error:
        wrong = str(error)
    BATCHES.check(wrong_tree=wrong)
    return tree
