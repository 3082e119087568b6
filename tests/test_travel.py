"""Values of ours that travel as keywords of modules survive what copies, casts or moves those keywords."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors, _recursive_to
from torch.utils._pytree import tree_map

from dfa_megatron import layouts, make_plan, masks
from dfa_megatron.huggingface.attention_function import PlannedMask
from dfa_megatron.huggingface.seen import Seen
from dfa_megatron.plan.language.tree import Tree


def cast(value: Any) -> Any:
    return _apply_to_tensors(lambda x: x.bfloat16() if x.is_floating_point() else x, {"value": value})["value"]


def move(value: Any) -> Any:
    return _recursive_to({"value": value}, torch.device("cpu"), False)[0]["value"]


WAYS: dict[str, Callable[[Any], Any]] = {
    "replace": lambda value: dataclasses.replace(value) if dataclasses.is_dataclass(value) else value,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301
    "tree_map": lambda value: tree_map(lambda leaf: leaf, value),
    "cast": cast,
    "move": move,
}


def values(dice: random.Random) -> dict[str, Any]:
    """Draw one of each value; some have been used, so that they keep what follows from them."""
    ranks = dice.randint(1, 5)
    lengths = [dice.randint(0, 7) for _ in range(ranks - 1)] + [dice.randint(1, 7)]
    layout = dice.choice([layouts.of_lengths(lengths), layouts.zigzag(sum(lengths) + 9, ranks)])
    mask = dice.choice([masks.causal(layout.length), masks.sliding_window(layout.length, 3)])
    tree = Tree((3, 2, 4), (-1, 0, dice.choice([0, 1])))
    plan = make_plan(mask, ranks, schedule="ring")
    if dice.random() < 0.5:
        assert mask.area
        assert [layout.tokens(rank) for rank in range(ranks)]
        assert plan.forward.pairs
        assert plan.digest
    named = {"layout": layout, "mask": mask, "tree": tree, "plan": plan, "phase": plan.forward}
    return named | {"seen": Seen(tree, ((0, 0),)), "window": PlannedMask(3)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_a_value_is_the_same_behind_it(way: str, seed: int) -> None:
    for name, value in values(random.Random(seed)).items():
        got = WAYS[way](value)
        assert (got, hash(got), repr(got)) == (value, hash(value), repr(value)), name
    phase = WAYS[way](values(random.Random(seed))["phase"])
    assert phase.steps > 0
    assert phase.pairs
    assert phase.layout.tokens(0) >= 0
