"""Rows that move between ranks, without a network: uneven and empty parts, tokens that nobody or several want."""

from __future__ import annotations

import random
from itertools import pairwise

import torch

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.runtime.execute.moves import Moves, moves_between

Parts = list[list[Span]]


def drawn(dice: random.Random, tokens: int, ranks: int) -> Parts:
    """Spans of all tokens, each of one rank, in an order of its own."""
    cuts = sorted({0, tokens, *(dice.randrange(tokens + 1) for _ in range(2 * ranks))})
    parts: Parts = [[] for _ in range(ranks)]
    for lo, hi in pairwise(cuts):
        parts[dice.choice([0, *range(ranks)])].append(Span(lo, hi))
    for part in parts:
        dice.shuffle(part)
    return parts


def exchanged(every: list[Moves], rows: list[torch.Tensor], fill: float) -> list[torch.Tensor]:
    """Run the moves of all ranks."""
    sent = [x.index_select(0, m.before.away).split(m.before.counts) for m, x in zip(every, rows, strict=True)]
    found = []
    for rank, (moves, x) in enumerate(zip(every, rows, strict=True)):
        came = torch.cat([theirs[rank] for theirs in sent])
        assert len(came) == sum(moves.after.counts)
        assert moves.after.counts[rank] == len(sent[rank][rank]) == 0
        found.append(moves.place_others(moves.place_own(x, fill=fill), came))
        turned = moves.place_others(moves.place_own(x.movedim(0, 1), 1, fill), came.movedim(0, 1), 1)
        assert turned.is_contiguous()
        assert torch.equal(turned.movedim(1, 0), found[-1])
    return found


def tokens_of(part: list[Span]) -> list[int]:
    return [token for span in part for token in range(span.lo, span.hi)]


def test_drawn_moves_bring_each_row_and_add_what_comes_back() -> None:
    shared = gaps = 0
    for seed in range(300):
        dice = random.Random(seed)
        tokens, ranks = dice.randint(1, 40), dice.randint(1, 5)
        held, wanted = (drawn(dice, tokens, ranks) for _ in range(2))
        if dice.random() < 0.5:
            whole = Span(lo := dice.randrange(tokens), dice.randint(lo + 1, tokens))
            wanted = [part if dice.random() < 0.5 else [whole] for part in wanted]
        for part in wanted:
            if dice.random() < 0.3:
                part.insert(dice.randint(0, len(part)), Span(-3, -1))
        every = [moves_between(held, wanted, rank) for rank in range(ranks)]
        value = torch.randn(tokens, 2)
        rows = [value[tokens_of(part)] for part in held]
        found = exchanged(every, rows, -7.0)
        for part, got in zip(wanted, found, strict=True):
            assert torch.equal(
                got,
                torch.stack([value[t] if t >= 0 else torch.full((2,), -7.0) for t in tokens_of(part)])
                if part
                else value[:0],
            )
        gradients = [torch.randn_like(x) for x in found]
        total = torch.zeros(tokens, 2)
        for part, gradient in zip(wanted, gradients, strict=True):  # in rank order, as the moves add
            for token, row in zip(tokens_of(part), gradient, strict=True):
                if token >= 0:
                    total[token] += row
        for part, got in zip(held, exchanged([moves.back() for moves in every], gradients, 0.0), strict=True):
            assert torch.equal(got, total[tokens_of(part)])
        shared += any(moves.before.shared for moves in every)
        gaps += any(span.lo < 0 for part in wanted for span in part)
    assert shared > 50
    assert gaps > 50
