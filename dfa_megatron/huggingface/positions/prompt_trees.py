"""Prompt trees: a batch tells the segments of its rows under one key, and layers get them in place of documents."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.sharding import tree_positions

KEY = "prompt_tree"
"""The key of a batch, and of a call, for the lengths and the parents of the segments."""


def positions_of(tree: Tree, device: torch.device | None = None) -> torch.Tensor:
    """Return the place of every token in its path, int64 (1, length)."""
    return tree_positions(tree.lengths, tree.parents, device=device)[None]


def tree_of(given: Any, length: int, beside: list[str]) -> Tree:
    """Return the segments that a batch or a call tells.

    Args:
        given: (lengths, parents).
        length: the tokens of a row on all ranks.
        beside: other keys that say which tokens attend to which.

    Raises:
        UnsupportedError: there are such keys, or the segments are no trees of that many tokens.
    """
    if beside:
        others = ", ".join(beside)
        raise UnsupportedError(
            f"a prompt_tree beside {others}",
            "it says by itself which tokens attend to which, and where they are; images are not planned in it",
            "the tree alone",
        )
    lengths, parents = (tuple(int(number) for number in numbers) for numbers in given)
    wrong = ""
    try:
        tree = Tree(lengths, parents)
        if tree.length != length:
            wrong = f"they have {tree.length} tokens, and a row has {length}"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise UnsupportedError(
            "a prompt_tree whose segments do not fit",
            wrong,
            "(lengths, parents) of a whole row, as dfa_megatron.masks.prompt_tree takes them",
        )
    return tree


def refuse_for(model: str) -> NoReturn:
    """Refuse a tree for a model.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"a prompt_tree for {model}",
        "tokens of one path would be taken for those of another",
        "a distributed model of text whose positions are counted from 0",
    )


def refuse_in_layer(module: object, why: str) -> NoReturn:
    """Refuse a tree in a layer that counts places.

    Raises:
        UnsupportedError: always.
    """
    layer = type(module).__name__
    raise UnsupportedError(
        f"a prompt_tree in a layer of type {layer} with {why}",
        "it counts places in the pack, where a token's neighbours may be of another path",
        "layers of full attention and rotary embeddings; or every path as a document of its own",
    )
