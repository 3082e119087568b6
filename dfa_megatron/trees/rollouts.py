"""From lists of tokens to packs: rollouts that share most stay together, and each shared prefix stands once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.trees.tree_pack import TreePack
from dfa_megatron.trees.trie import Node, lay_out, preorder, trie_of

TokenRows = list[torch.Tensor]


def from_rollouts(
    token_lists: Sequence[Any],
    loss_masks: Sequence[Any] | None = None,
    *,
    length: int | None = None,
    multiple_of: int = 1,
    pad: int = 0,
) -> list[TreePack]:
    """Pack rollouts as forests in which each shared prefix stands once; call it with the same rollouts on every rank.

    Prefixes are found by comparing tokens: prompts, an agent's turns, branches of a search, equal rollouts. A prefix's
    last token stands in each of its continuations, so that every first token is predicted.

    Args:
        token_lists: the token ids of each rollout with its prompt: a list, an array or a tensor (tokens,).
        loss_masks: for each rollout (tokens,) of 0 and 1: which of its tokens count. None: all. A first token is not
            predicted and never counts.
        length: the most tokens of a pack; None: one pack. A group that is larger becomes several trees.
        multiple_of: each pack is padded to a multiple of this: 2 x CP for Megatron, the ranks for transformers, or
            `length`. The functions of this package take any number of tokens.
        pad: the token of the padding.

    Raises:
        UnsupportedError: no rollouts, an empty one, one longer than a pack, or a mask that does not fit.
    """
    rollouts, masks = _read(token_lists, loss_masks)
    if multiple_of < 1:
        raise UnsupportedError(f"multiple_of={multiple_of}", "packs are padded to a multiple of it", "1 or more")
    everyone = range(len(rollouts))
    members = [[*everyone]]
    if length is not None:
        most = length - length % multiple_of
        longest = max(everyone, key=lambda number: len(rollouts[number]))
        if len(rollouts[longest]) > most:
            what = f"rollout {longest} of {len(rollouts[longest])} tokens in packs of {most}"
            instead = f"length={-(-len(rollouts[longest]) // multiple_of) * multiple_of}, or shorter rollouts"
            raise UnsupportedError(what, "a rollout is never cut", instead)
        members = _together(trie_of(rollouts, everyone), most)
    return [_pack(rollouts, masks, numbers, multiple_of, pad) for numbers in members]


def _together(root: Node, most: int) -> list[list[int]]:
    """Return which rollouts make a pack: from the leaves up, those below a node go together while they fit.

    Each node has bins: the tokens of their paths from the root, and rollouts. Bins that meet in a node share its path.
    """
    bins: dict[Node, list[tuple[int, list[int]]]] = {}
    for node in reversed([root, *(node for node, _ in preorder(root))]):
        filled: list[tuple[int, list[int]]] = [] if node.children else [(node.hi, [])]
        shared = max(node.hi - 1, 0)  # its last token stands in every child
        below = [found for child in node.children.values() for found in bins.pop(child)]
        for tokens, numbers in sorted(below, key=lambda found: -found[0]):
            at = next((at for at, (held, _) in enumerate(filled) if held + tokens - shared <= most), len(filled))
            held, others = filled[at] if at < len(filled) else (shared, [])
            filled[at : at + 1] = [(held + tokens - shared, others + numbers)]
        filled[0] = filled[0][0], filled[0][1] + node.ending
        bins[node] = filled
    return sorted(sorted(numbers) for _, numbers in bins[root])


def _pack(rollouts: TokenRows, masks: TokenRows, numbers: Sequence[int], multiple_of: int, pad: int) -> TreePack:
    """Lay some rollouts out in one row."""
    tree, ids, predicting = lay_out(trie_of(rollouts, numbers), rollouts)
    if missing := -tree.length % multiple_of:
        tree = Tree((*tree.lengths, missing), (*tree.parents, -1))
    n = tree.length
    sources = [torch.where(masks[number][1:], predicting[number], n) for number in numbers]
    flat = torch.cat([F.pad(own, (1, 0), value=n) for own in sources])
    labels = torch.full((n + 1,), IGNORED)
    labels[flat] = torch.cat([rollouts[number] for number in numbers])  # those of one place are the same token
    return TreePack(
        tree=tree,
        rollouts=tuple(numbers),
        input_ids=F.pad(ids, (0, missing), value=pad)[None],
        labels=labels[None, :n],
        weights=torch.bincount(flat, minlength=n + 1).float()[None, :n],
        _lengths=tuple(len(own) + 1 for own in sources),
        _sources=flat,
    )


def _read(token_lists: Sequence[Any], loss_masks: Sequence[Any] | None) -> tuple[TokenRows, TokenRows]:
    """Return tokens, int64, and masks, bool, on the CPU."""
    rollouts = [torch.as_tensor(tokens).detach().cpu() for tokens in token_lists]
    given = [torch.ones_like(own) for own in rollouts] if loss_masks is None else loss_masks
    masks = [torch.as_tensor(mask).detach().cpu() for mask in given]
    if not rollouts or len(masks) != len(rollouts):
        what = f"{len(rollouts)} rollouts with {len(masks)} loss masks"
        raise UnsupportedError(what, "each has one", "as many, and one or more")
    for number, (own, mask) in enumerate(zip(rollouts, masks, strict=True)):
        ids = own.dim() == 1 and len(own) and not own.is_floating_point()
        if not ids or mask.shape != own.shape or ((mask != 0) & (mask != 1)).any():
            raise UnsupportedError(
                f"rollout {number} of shape {tuple(own.shape)} in {own.dtype}, with its loss mask",
                "a rollout is a row of token ids, and its mask says which of them count",
                "one integer or more (tokens,), and as many numbers 0 and 1; weigh tokens by tokens_of or by_rollout",
            )
    return [own.long() for own in rollouts], [mask.bool() for mask in masks]
