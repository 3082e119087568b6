"""Shares and folds, without processes: every kind of recurrence over 1 to 5 ranks against one, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.recurrence import Scan
from dfa_megatron.recurrence.fold import fold
from dfa_megatron.recurrence.local_scan import local_scan
from dfa_megatron.recurrence.share import Share
from dfa_megatron.recurrence.token_loop import linear_attention
from tests.support.close import assert_close
from tests.support.packs import random_offsets
from tests.support.recurrences import KINDS, Recurrence, forest, recurrence

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


def distributed(whole: Recurrence, ranks: int, offsets: tuple[int, ...], parents: Sequence[int] = ()) -> None:
    """Fold over dictionaries in place of an all-gather, and compare; PyTorch differentiates the fold."""
    shares = [Share(rank, ranks, whole.dout.shape[1] // ranks, offsets, tuple(parents)) for rank in range(ranks)]
    tokens = [whole.rows(rank, ranks) for rank in range(ranks)]
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
def test_every_recurrence_is_exact_over_one_to_five_ranks(kind: str) -> None:
    for ranks in range(1, 6):
        tokens = 7 if ranks == 3 else 5
        distributed(recurrence(kind, ranks * tokens, seed=ranks), ranks, ())
    distributed(recurrence(kind, 9, seed=9, dtype=torch.float32), 3, ())


@pytest.mark.parametrize("kind", KINDS)
def test_packs_with_documents_of_one_token_are_exact(kind: str) -> None:
    draw = random.Random(KINDS.index(kind))
    for ranks in range(1, 6):
        length = ranks * 4
        cut = random_offsets(length, draw)
        for offsets in (cut, (0, 1, length) if length > 1 else (0, 1), tuple(range(length + 1))):
            distributed(recurrence(kind, length, seed=ranks, packs=bool(ranks % 2)), ranks, offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_children_begin_with_the_state_after_their_parent(kind: str) -> None:
    draw = random.Random(KINDS.index(kind))
    for ranks in range(1, 7):
        for tokens in (1, 5):
            offsets, parents = forest(length := ranks * tokens, draw)
            distributed(recurrence(kind, length, seed=tokens, packs=draw.random() < 0.5), ranks, offsets, parents)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_share_follows_paths_token_by_token(ranks: int, tokens: int, count: int, draw: random.Random) -> None:
    offsets, parents = forest(length := ranks * tokens, draw)
    above = [at - 1 for at in range(length)]
    for at, parent in enumerate(parents):
        above[offsets[at]] = offsets[parent + 1] - 1 if parent >= 0 else -1
    shares = [Share(rank, ranks, tokens, offsets, tuple(parents)) for rank in range(ranks)]
    last = [each.rank * tokens + end - 1 for each in shares for end in each.pieces[1:]]
    for rank, share in enumerate(shares):
        lo, mine = rank * tokens, range(rank * tokens, (rank + 1) * tokens)
        starts = [lo + start for start in share.pieces[:-1]]
        assert starts == [at for at in mine if at == lo or at in offsets]
        assert [starts[piece - share.mine[0]] for piece in share.led] == [at for at in starts if above[at] >= 0]
        assert [last[piece] for piece in share.brought[rank]] == sorted({above[at] for at in starts} & {*range(lo)})
        reach = share.reach(count)
        rows = [-1, *(lo + at for at in reach.own), *reach.brings[rank]]
        for number, run in enumerate(share.leads):
            at, want = starts[run[0] - share.mine[0]], list[int]()
            while len(want) < count:
                at = above[at] if at >= 0 else -1
                want.insert(0, at)
            assert [rows[row] for row in reach.rows[number * count : (number + 1) * count]] == want
        others = {token for each in shares for token in each.reach(count).brings[each.rank]}
        assert [lo + at for at in reach.sends[rank]] == sorted(others & {*mine})
        assert share.crosses == any(each.brought[each.rank] for each in shares)


def test_tokens_that_do_not_belong_together_are_refused() -> None:
    x = recurrence("gla", 4, seed=0).tokens
    with pytest.raises(UnsupportedError, match="lengths"):
        local_scan(Scan(linear_attention, "k", "v"), {**x, "v": x["v"][:, :2]}, Share(0, 1, 4))
    with pytest.raises(UnsupportedError, match="no 'key' among them"):
        local_scan(Scan(linear_attention, "key", "v"), x, Share(0, 1, 4))
    with pytest.raises(UnsupportedError, match="it ends at 4, but the ranks hold 8"):
        Share(0, 2, 4, (0, 4))
