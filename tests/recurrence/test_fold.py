"""Shares of recurrences, without processes: which states each piece of a rank begins with, token by token."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from dfa_megatron.layouts import contiguous, zigzag
from dfa_megatron.recurrence import Scan, dist_scan
from dfa_megatron.recurrence.local_scan import local_scan
from dfa_megatron.recurrence.passing import _moves
from dfa_megatron.recurrence.share import Share, edges_of
from dfa_megatron.recurrence.token_loop import linear_attention
from tests.support.arguments import assert_refused
from tests.support.plan_cases import some_parents
from tests.support.recurrences import forest, recurrence, uneven, with_empty


@pytest.mark.parametrize("seed", range(100))
def test_a_share_follows_paths_token_by_token(seed: int) -> None:
    draw = random.Random(seed)
    ranks, tokens, count = draw.randint(1, 6), draw.randint(1, 5), draw.randint(1, 6)
    offsets = with_empty(forest(length := ranks * tokens, draw)[0], draw)
    parents, above, ends = some_parents(len(offsets) - 1, draw), [at - 1 for at in range(length)], list[int]()
    for (lo, hi), parent in zip(pairwise(offsets), parents, strict=True):
        before = ends[parent] if parent >= 0 else -1
        ends.append(hi - 1 if lo < hi else before)
        above[lo : lo + (lo < hi)] = [before] * (lo < hi)
    edges = edges_of(uneven(length, ranks, draw), 0, ranks)
    shares = [Share(rank, edges, offsets, tuple(parents)) for rank in range(ranks)]
    last = [edges[each.rank] + end - 1 for each in shares for end in each.pieces[1:]]
    for rank, share in enumerate(shares):
        lo, mine = edges[rank], range(*edges[rank : rank + 2])
        starts = [lo + start for start in share.pieces[:-1]]
        assert starts == [at for at in mine if at == lo or at in offsets]
        assert [starts[piece - share.mine[0]] for piece in share.led] == [at for at in starts if above[at] >= 0]
        before = {above[at] for at in starts} if mine else {lo - 1}
        assert [last[piece] for piece in share.brought[rank]] == sorted(before & {*range(lo)})
        reach = share.reach(count)
        rows = [-1, *(lo + at for at in reach.own), *reach.brings[rank]]
        for number, run in enumerate(share.leads):
            at, want = starts[run[0] - share.mine[0]], list[int]()
            while len(want) < count:
                at = above[at] if at >= 0 else -1
                want.insert(0, at)
            assert [rows[row] for row in reach.rows[number * count : (number + 1) * count]] == want
        sent = {*(_moves(share, count, torch.device("cpu")).before.away + lo).tolist()}
        assert sent == {*mine} & {*sum(reach.brings, ())}
        assert share.crosses == any(each.brought[each.rank] for each in shares)


def test_tokens_that_do_not_belong_together_are_refused() -> None:
    x = recurrence("gla", 4, seed=0).tokens
    assert_refused("lengths", local_scan, Scan(linear_attention, "k", "v"), {**x, "v": x["v"][:, :2]}, Share(0, (0, 4)))
    assert_refused("no 'key' among them", local_scan, Scan(linear_attention, "key", "v"), x, Share(0, (0, 4)))
    assert_refused("no 'k' among them", dist_scan, Scan(linear_attention, "k", "v"), {})
    assert_refused("it ends at 4, but the ranks hold 8", Share, 0, (0, 4, 8), (0, 4))
    for layout in ("zigzag", zigzag(8, 2), contiguous(8, 4)):
        assert_refused("contiguous tokens, in rank order", edges_of, layout, 4, 2)
