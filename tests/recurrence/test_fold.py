"""Shares and folds, without processes: every kind of recurrence over 1 to 5 ranks against one, token by token."""

from __future__ import annotations

import random
from itertools import pairwise

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
from tests.support.recurrences import KINDS, Recurrence, recurrence

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


def distributed(whole: Recurrence, ranks: int, offsets: tuple[int, ...]) -> None:
    """Fold over lists in place of an all-gather, and compare; PyTorch differentiates the fold."""
    shares = [Share(rank, ranks, whole.dout.shape[1] // ranks, offsets) for rank in range(ranks)]
    tokens = [whole.rows(rank, ranks) for rank in range(ranks)]
    locals_ = [local_scan(whole.scan, x, share, whole.decay(x)) for x, share in zip(tokens, shares, strict=True)]
    outs = []
    for share, local in zip(shares, locals_, strict=True):
        came = fold([(locals_[rank].m, locals_[rank].state) for rank in share.before], matrix=local.matrix)
        outs.append(local.finish(torch.zeros_like(local.state) if came is None else came)[0])
    out, gradients = whole.whole(offsets)
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


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_a_share_follows_documents_token_by_token(ranks: int, tokens: int, data: st.DataObject) -> None:
    length = ranks * tokens
    cuts = data.draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
    offsets = (0, *sorted(cuts), length)
    document = [at for at, (lo, hi) in enumerate(pairwise(offsets)) for _ in range(lo, hi)]
    for rank in range(ranks):
        share, lo = Share(rank, ranks, tokens, offsets), rank * tokens
        mine = document[lo : lo + tokens]
        assert [hi - lo for lo, hi in pairwise(share.pieces)] == [mine.count(d) for d in sorted(set(mine))]
        assert share.seen(rank, 99) == document[:lo].count(document[lo])
        assert share.continues(rank) == (document[lo] in document[:lo])
        assert share.keeps(rank) == (len(set(mine)) == 1)
        brought = {at // tokens for at in range(lo) if document[at] == document[lo]}
        assert set(share.before) == brought
        last = document[lo + tokens - 1]
        assert set(share.after) == {at // tokens for at in range(lo + tokens, length) if document[at] == last}
        assert share.crosses == any(document[r * tokens] == document[r * tokens - 1] for r in range(1, ranks))
    assert share.chains == any(len(Share(rank, ranks, tokens, offsets).before) > 1 for rank in range(ranks))


def test_tokens_that_do_not_belong_together_are_refused() -> None:
    x = recurrence("gla", 4, seed=0).tokens
    with pytest.raises(UnsupportedError, match="lengths"):
        local_scan(Scan(linear_attention, "k", "v"), {**x, "v": x["v"][:, :2]}, Share(0, 1, 4))
    with pytest.raises(UnsupportedError, match="no 'key' among them"):
        local_scan(Scan(linear_attention, "key", "v"), x, Share(0, 1, 4))
    with pytest.raises(UnsupportedError, match="it ends at 4, but the ranks hold 8"):
        Share(0, 2, 4, (0, 4))
