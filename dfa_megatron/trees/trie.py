"""Rollouts as a trie of tokens, cut where they part; its nodes become the segments of a tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dfa_megatron.plan.language.tree import Tree


@dataclass(slots=True, eq=False)
class Node:
    """Tokens lo to hi of a rollout, which all that pass here share; it has no child or several, the root any number."""

    rollout: int = -1
    lo: int = 0
    hi: int = 0
    children: dict[int, Node] = field(default_factory=dict)
    """By their first token, in the order of the rollouts."""
    ending: list[int] = field(default_factory=list)
    """The rollouts that end here."""


def trie_of(rollouts: Sequence[torch.Tensor], numbers: Iterable[int]) -> Node:
    """Return the root of the rollouts with these numbers, each int64 (tokens) on the CPU."""
    root = Node()
    for number in numbers:
        tokens, node, shared = rollouts[number], root, {number: len(rollouts[number])}
        while node.hi < len(tokens):
            child = node.children.setdefault(int(tokens[node.hi]), Node(number, node.hi, len(tokens)))
            theirs = rollouts[child.rollout]
            if child.rollout not in shared:
                shared[child.rollout] = _shared(theirs, tokens)
            at = min(shared[child.rollout], child.hi)
            if at == child.hi and not child.children:  # the longer of two stands for both
                child.rollout, child.hi = number, len(tokens)
            elif at < min(child.hi, len(tokens)):
                child.children = {int(theirs[at]): Node(child.rollout, at, child.hi, child.children)}
                child.hi = at
            elif at < child.hi:
                break
            node = child
    for number in numbers:
        node = root
        while node.hi < len(rollouts[number]):
            node = node.children[int(rollouts[number][node.hi])]
        node.ending.append(number)
    return root


def preorder(root: Node) -> Iterator[tuple[Node, Node]]:
    """Yield each node but the root with its parent, depth first; without recursion, as paths may be long."""
    stack = [(child, root) for child in reversed(root.children.values())]
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack += [(child, node) for child in reversed(node.children.values())]


def lay_out(root: Node, rollouts: Sequence[torch.Tensor]) -> tuple[Tree, torch.Tensor, dict[int, torch.Tensor]]:
    """Return segments, their tokens, and for each rollout the places that predict its tokens but the first.

    The last token before a fork begins each child instead, as a copy: so every place has one next token.
    """
    lengths, parents, rows = list[int](), list[int](), list[torch.Tensor]()
    segment, length = {root: -1}, 0
    paths, predicting = {root: torch.arange(0)}, dict[int, torch.Tensor]()
    for node, parent in preorder(root):
        lo, hi = node.lo - (parent is not root), node.hi - bool(node.children)
        paths[node] = torch.cat([paths[parent], torch.arange(length, length + hi - lo)])
        predicting |= {number: paths[node][: len(rollouts[number]) - 1] for number in node.ending}
        segment[node] = segment[parent]
        if lo < hi:  # a root of one token has gone into its children
            segment[node] = len(lengths)
            lengths.append(hi - lo)
            parents.append(segment[parent])
            rows.append(rollouts[node.rollout][lo:hi])
            length += hi - lo
    return Tree(tuple(lengths), tuple(parents)), torch.cat(rows), predicting


def _shared(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many tokens two rows have in common from their first on."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.byte().argmax()) if differ.any() else shorter
