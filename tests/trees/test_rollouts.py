"""Rollouts packed over ranks give the numbers and the gradients of each rollout alone, in float64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dfa_megatron import DistAttentionConfig, dist_flash_attn_func, shard_sequence, trees
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss import Head, token_scores
from tests.support.recurrences import uneven
from tests.support.workers import run_ranks

VOCABULARY, WIDTH, LAYERS = 4, 8, 2
Rollouts = list[list[int]]


def drawn(rng: random.Random, tokens: int = 9) -> tuple[Rollouts, list[list[int]]]:
    """Rollouts of few words, which share much: branches, equal ones, prefixes of others, single tokens; and masks."""
    rollouts: Rollouts = []
    for _ in range(rng.randint(1, 9)):
        begin = rng.choice([*rollouts, []])
        kept = begin[: rng.randint(0, len(begin))]
        rollouts.append(kept + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, tokens - len(kept)))] or [1])
    full, empty = rng.random(), rng.random() / 4
    masks = [
        [int(empty < chance and rng.random() < full + 0.3) for _ in own]
        for own in rollouts
        for chance in [rng.random()]
    ]
    return rollouts, masks


def prefixes(rollouts: Rollouts) -> set[tuple[int, ...]]:
    return {tuple(own[:end]) for own in rollouts for end in range(1, len(own) + 1)}


def size(rollouts: Rollouts) -> int:
    """Tokens of a pack: each prefix once, and a copy more for each branch but one of a fork."""
    there = prefixes(rollouts)
    branches = [sum((*prefix, word) in there for word in range(VOCABULARY)) for prefix in there]
    return len(there) + sum(max(count - 1, 0) for count in branches)


def seen_from(pack: trees.TreePack, place: int) -> list[int]:
    """The tokens of a place's path up to it."""
    spans, ids = pack.tree.spans, pack.input_ids[0].tolist()
    segment = next(at for at, span in enumerate(spans) if span.lo <= place < span.hi)
    found = ids[spans[segment].lo : place + 1]
    while (segment := pack.tree.parents[segment]) >= 0:
        found = ids[spans[segment].lo : spans[segment].hi] + found
    return found


@pytest.mark.parametrize("length", [None, 9, 14])
def test_each_prefix_stands_once_and_every_counted_token_is_predicted_from_its_own_path(length: int | None) -> None:
    rng = random.Random(length)
    for _ in range(150):
        rollouts, masks = drawn(rng)
        multiple = rng.choice([1, 2, 3])
        packs = trees.from_rollouts(rollouts, masks, length=length and length + 2, multiple_of=multiple)
        assert sorted(itertools.chain(*(pack.rollouts for pack in packs))) == [*range(len(rollouts))]
        for pack in packs:
            own = [rollouts[number] for number in pack.rollouts]
            assert pack.tree.length == size(own) + -size(own) % multiple == pack.input_ids.numel()
            assert pack.tree.length <= (length or 999) + 2
            assert pack.weights.sum() == sum(sum(masks[number][1:]) for number in pack.rollouts)
            assert ((pack.labels == -100) == (pack.weights == 0)).all()
            labels, places = pack.by_rollout(pack.labels[0]), pack.by_rollout(torch.arange(1, pack.tree.length + 1))
            for number, place in places.items():
                tokens, counts = torch.tensor(rollouts[number]), [0, *masks[number][1:]]
                assert (place > 0).tolist() == [*map(bool, counts)]
                assert labels[number].tolist() == (tokens * torch.tensor(counts)).tolist()
                for at in place.nonzero()[:, 0].tolist():
                    assert seen_from(pack, int(place[at]) - 1) == rollouts[number][:at]
                    assert int(pack.positions[0, place[at] - 1]) == at - 1


def test_rollouts_that_share_most_stay_together() -> None:
    assert trees.from_rollouts([[1, 2], [1, 2, 3], [1]])[0].tree.lengths == (3,)
    first, second = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    rollouts = [[*prompt, answer] for answer in range(4) for prompt in (first, second)]
    packs = trees.from_rollouts(rollouts, length=12)
    assert [pack.rollouts for pack in packs] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [pack.tree.length for pack in packs] == [12, 12]
    (whole,) = trees.from_rollouts(rollouts, length=24)
    assert whole.tree.parents == (-1, 0, 0, 0, 0, -1, 5, 5, 5, 5)
    assert [len(pack.rollouts) for pack in trees.from_rollouts(rollouts, length=10)] == [3, 3, 1, 1]


Weights = dict[str, torch.Tensor]


def weights_of_model() -> Weights:
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (VOCABULARY, WIDTH),
        "places": (16, WIDTH),
        "head": (VOCABULARY, WIDTH),
    }
    shapes |= {f"layer{at}": (4, WIDTH, WIDTH) for at in range(LAYERS)}
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) / 2).requires_grad_()
        for name, shape in shapes.items()
    }


def hidden_states(weights: Weights, ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
    """A small transformer of two heads; ids (1, tokens)."""
    x = F.embedding(ids, weights["tokens"]) + F.embedding(positions, weights["places"])
    for at in range(LAYERS):
        q, k, v = ((x @ w).unflatten(-1, (2, -1)) for w in weights[f"layer{at}"][:3])
        x = x + (attend(q, k, v).flatten(2) @ weights[f"layer{at}"][3]).tanh()
    return x


def alone(weights: Weights, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a rollout's tokens, and the entropies they were drawn with; 0 for the first."""

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    ids = torch.tensor([tokens])
    logits = hidden_states(weights, ids, torch.arange(len(tokens))[None], attend)[0, :-1] @ weights["head"].T
    logp = logits.log_softmax(-1)
    both = logp.gather(1, ids[0, 1:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    return F.pad(both[0], (1, 0)), F.pad(both[1], (1, 0))


def objective(found: Any, masks: Any, old: Any, advantages: list[float]) -> torch.Tensor:
    """A clipped policy loss and an entropy bonus, which are of each rollout alone."""
    total = torch.zeros((), dtype=torch.float64)
    for number, (logp, entropy) in found.items():
        ratio, advantage = (logp - old[number]).exp(), advantages[number]
        each = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.1 * entropy
        total = total - (each * torch.tensor([0, *masks[number][1:]])).sum()
    return total


def compare(rank: int, ranks: int, seed: int) -> None:
    rng = random.Random(f"{seed} {ranks}")
    for _ in range(4):
        rollouts, masks = drawn(rng)
        advantages = [rng.gauss(0, 1) for _ in rollouts]
        old = [torch.tensor([rng.gauss(-1, 0.3) for _ in own], dtype=torch.float64) for own in rollouts]
        one, ours = weights_of_model(), weights_of_model()
        wanted = {number: alone(one, own) for number, own in enumerate(rollouts)}
        loss = objective(wanted, masks, old, advantages)
        linear = -sum((wanted[at][0] * torch.tensor([0, *masks[at][1:]])).sum() * a for at, a in enumerate(advantages))
        (loss + linear).backward()
        got_loss = got_linear = torch.zeros((), dtype=torch.float64)
        for pack in trees.from_rollouts(rollouts, masks, length=rng.choice([None, 24])):
            cut = {"layout": rng.choice(["contiguous", "zigzag", uneven(pack.tree.length, ranks, rng)])}
            ids, labels, positions = (shard_sequence(x, **cut) for x in (pack.input_ids, pack.labels, pack.positions))

            def attend(*qkv: torch.Tensor, tree: Any = pack.tree, cut: Any = cut) -> torch.Tensor:
                config = DistAttentionConfig(kernel="reference")
                return dist_flash_attn_func(*qkv, mask=tree.mask(), config=config, **cut)

            hidden = hidden_states(ours, ids, positions, attend)
            scores = token_scores(hidden, Head(weight=ours["head"]), labels, tile=5, entropy=True)
            logps, entropies = (pack.by_rollout(x[0], **cut) for x in (scores.logprobs, scores.entropy))
            for number in pack.rollouts:
                counts = torch.tensor([0, *masks[number][1:]])
                for ours_, theirs in zip((logps[number], entropies[number]), wanted[number], strict=True):
                    torch.testing.assert_close(ours_, theirs * counts, rtol=1e-12, atol=1e-13)
            back = pack.tokens_of(logps, combine="mean")
            torch.testing.assert_close(shard_sequence(back, **cut), scores.logprobs, rtol=1e-14, atol=1e-14)
            found = {number: (logps[number], entropies[number]) for number in pack.rollouts}
            got_loss = got_loss + objective(found, masks, old, advantages)
            local = shard_sequence(pack.tokens_of(torch.tensor(advantages, dtype=torch.float64), combine="sum"), **cut)
            got_linear = got_linear - (scores.logprobs * local).sum()
        (got_loss / ranks + got_linear).backward()  # the one is the same on every rank, the other this rank's part
        dist.all_reduce(total := got_linear.detach().clone()) if ranks > 1 else (total := got_linear.detach())
        torch.testing.assert_close(torch.stack([got_loss, total]), torch.stack([loss, linear]), rtol=1e-11, atol=1e-12)
        for name, weight in ours.items():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if ranks > 1:
                dist.all_reduce(gradient)
            theirs = torch.zeros_like(weight) if one[name].grad is None else one[name].grad
            torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-11, msg=f"{name}, seed {seed}")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packed_over_ranks_is_one_by_one_in_every_number_and_gradient(ranks: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    if ranks == 1:
        compare(0, 1, seed)
    else:
        run_ranks(ranks, compare, seed, timeout=120)


PAIR: Rollouts = [[1, 2, 3], [1, 2, 0]]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"token_lists": []}, "0 rollouts with 0 loss masks"),
        ({"token_lists": [[1], []]}, "rollout 1 of shape"),
        ({"token_lists": [[1.5]]}, "rollout 0 of shape"),
        ({"multiple_of": 0}, "multiple_of=0"),
        ({"loss_masks": [[1, 1, 1]]}, "2 rollouts with 1 loss masks"),
        ({"loss_masks": [[1, 1, 1], [1, 1]]}, "rollout 1 of shape"),
        ({"loss_masks": [[1, 1, 1], [0, 0.5, 1]]}, "rollout 1 of shape"),
        (
            {"length": 5, "multiple_of": 3, "token_lists": [[1], [1, 2, 3, 4]]},
            r"rollout 1 of 4 tokens in packs of 3.*length=6",
        ),
    ],
)
def test_what_is_no_pack_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        trees.from_rollouts(**{"token_lists": PAIR} | given)


def test_numbers_of_a_shared_token_are_combined_by_the_rule_that_is_named() -> None:
    (pack,) = trees.from_rollouts(PAIR, multiple_of=7)
    assert pack.tokens_of([1, 2], combine="sum").tolist() == [[3, 1, 0, 2, 0, 0, 0]]
    assert pack.tokens_of({0: 1, 1: [1, 1, 2]}, combine="mean").tolist() == [[1, 1, 0, 2, 0, 0, 0]]
    assert pack.weights.tolist() == [[2, 1, 0, 1, 0, 0, 0]]
    with pytest.raises(RuntimeError, match="must match the existing size"):
        pack.tokens_of([1.0, torch.ones(2)], combine="sum")
    with pytest.raises(UnsupportedError, match="combine='avg'"):
        pack.tokens_of([1, 2], combine="avg")  # type: ignore[arg-type]
