"""Shares and folds, without processes: every kind of recurrence over 1 to 5 ranks against one, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.layouts import Layout, contiguous, zigzag
from dfa_megatron.recurrence import Scan
from dfa_megatron.recurrence.fold import fold
from dfa_megatron.recurrence.local_scan import local_scan
from dfa_megatron.recurrence.passing import _moves
from dfa_megatron.recurrence.share import Share, edges_of
from dfa_megatron.recurrence.token_loop import linear_attention
from tests.support.close import assert_close
from tests.support.packs import random_offsets
from tests.support.plan_cases import some_parents
from tests.support.recurrences import KINDS, Recurrence, forest, recurrence, uneven, with_empty

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


def distributed(
    whole: Recurrence, ranks: int, offsets: tuple[int, ...], parents: Sequence[int] = (), layout: Layout | None = None
) -> None:
    """Fold over dictionaries in place of an all-gather, and compare; PyTorch differentiates the fold."""
    edges = edges_of(layout or "contiguous", 0, ranks, (0, whole.dout.shape[1]))
    shares = [Share(rank, edges, offsets, tuple(parents)) for rank in range(ranks)]
    tokens = [whole.rows(rank, ranks, layout) for rank in range(ranks)]
    locals_ = [local_scan(whole.scan, x, share, whole.decay(x)) for x, share in zip(tokens, shares, strict=True)]
    outs = []
    for share, local in zip(shares, locals_, strict=True):
        sent = {piece: each.carries[piece] for at, each in enumerate(locals_) for piece in share.sent[at]}
        came = fold(sent, share.source, share.brought[share.rank], matrix=local.matrix)
        states = [came[piece] for piece in share.brought[share.rank]] or [torch.zeros(1, dtype=whole.dout.dtype)]
        outs.append(local.finish(torch.stack(states))[0])
    out, gradients = whole.whole(offsets, parents)
    tolerance = TOLERANCE[whole.dout.dtype]
    assert_close(torch.cat(outs, 1), out, tolerance=tolerance, name="out")
    leaves = [x for rank in tokens for x in rank.values()]
    found = torch.autograd.grad(torch.cat(outs, 1), leaves, whole.dout)
    names = list(whole.tokens)
    for at, name in enumerate(names):
        got = torch.cat(found[at :: len(names)], 1)
        assert_close(got, gradients[name], tolerance=8 * tolerance, name=f"gradient of {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_recurrence_its_packs_and_its_trees_are_exact_over_one_to_six_ranks(kind: str) -> None:
    """Packs with documents of one token and of none; children begin with the state after their parent."""
    draw = random.Random(KINDS.index(kind))
    distributed(recurrence(kind, 9, seed=9, dtype=torch.float32), 3, ())
    for ranks in range(1, 7):
        distributed(recurrence(kind, length := 4 * ranks + 1, seed=ranks), ranks, ())
        distributed(recurrence(kind, 7, seed=ranks), ranks, (), layout=uneven(7, ranks, draw))
        cut = with_empty(random_offsets(length, draw), draw)
        for offsets in (cut, (0, 1, length), tuple(range(length + 1))):
            layout = draw.choice([None, uneven(length, ranks, draw)])
            distributed(recurrence(kind, length, seed=ranks, packs=bool(ranks % 2)), ranks, offsets, (), layout)
        for tokens in (1, 5):
            offsets = with_empty(forest(length := ranks * tokens, draw)[0], draw)
            tree = offsets, some_parents(len(offsets) - 1, draw)
            layout = draw.choice([None, uneven(length, ranks, draw)])
            distributed(recurrence(kind, length, seed=tokens, packs=draw.random() < 0.5), ranks, *tree, layout)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_share_follows_paths_token_by_token(ranks: int, tokens: int, count: int, draw: random.Random) -> None:
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
        assert {*(_moves(share, count, torch.device("cpu")).sent + lo).tolist()} == {*mine} & {*sum(reach.brings, ())}
        assert share.crosses == any(each.brought[each.rank] for each in shares)


def test_tokens_that_do_not_belong_together_are_refused() -> None:
    x = recurrence("gla", 4, seed=0).tokens
    with pytest.raises(UnsupportedError, match="lengths"):
        local_scan(Scan(linear_attention, "k", "v"), {**x, "v": x["v"][:, :2]}, Share(0, (0, 4)))
    with pytest.raises(UnsupportedError, match="no 'key' among them"):
        local_scan(Scan(linear_attention, "key", "v"), x, Share(0, (0, 4)))
    with pytest.raises(UnsupportedError, match="it ends at 4, but the ranks hold 8"):
        Share(0, (0, 4, 8), (0, 4))
    for layout in ("zigzag", zigzag(8, 2), contiguous(8, 4)):
        with pytest.raises(UnsupportedError, match="contiguous tokens, in rank order"):
            edges_of(layout, 4, 2)
