"""The choices of `auto` and of the degree stay as good as the saved ones, by the estimates saved with them.

`choices.json` has, for each of 384 cells, profile, ranks, tokens a rank, heads, key heads, mask, choice, and the
seconds of every candidate; for each of 128 cells of degrees the seconds by degree.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from dfa_megatron.plan.cost.choose import best, candidates
from dfa_megatron.plan.cost.hardware import PROFILES
from dfa_megatron.plan.degree import automatic_degree
from dfa_megatron.plan.language.mask import Mask, causal, documents, full, sliding_window
from dfa_megatron.plan.language.sizes import Sizes

SAVED = json.loads(Path(__file__).with_name("choices.json").read_text(encoding="utf-8"))
WORSE = 1.03


def mask_of(name: str, tokens: int, draw: random.Random) -> Mask:
    if name != "pack":
        return {"causal": causal, "full": full}[name](tokens) if name != "window" else sliding_window(tokens, 4096)
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, max(16, int(draw.lognormvariate(math.log(1500), 1.2)))))
    return documents(lengths)


def test_no_schedule_is_worse_than_the_saved_choice() -> None:
    draw, worse = random.Random(1), []
    for profile, ranks, tokens, heads, kv_heads, name, taken, seconds in SAVED["cells"]:
        mask = mask_of(name, ranks * tokens, draw)
        shape = Sizes(heads=heads, kv_heads=kv_heads, backward_needs="delta")
        chosen = best(candidates(mask, ranks, layout="contiguous", sizes=shape, hardware=PROFILES[profile]))
        assert chosen is not None
        if seconds[chosen.name] > WORSE * seconds[taken]:
            worse.append((profile, ranks, tokens, heads, kv_heads, name, taken, chosen.name))
    assert worse == []


@pytest.mark.parametrize("profile", sorted({cell[0] for cell in SAVED["degrees"]}))
def test_no_degree_is_worse_than_the_saved_choice(profile: str) -> None:
    worse = []
    for _, ranks, tokens, heads, kv_heads, taken, seconds in (c for c in SAVED["degrees"] if c[0] == profile):
        degree = automatic_degree(causal(ranks * tokens), ranks, heads, kv_heads, "auto", PROFILES[profile])
        if seconds[str(degree)] > WORSE * seconds[str(taken)]:
            worse.append((ranks, tokens, heads, kv_heads, taken, degree))
    assert worse == []
