"""A second derivative that no backward of ours can give is an error: never a gradient penalty without effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.loss import Head, cross_entropy, token_scores
from dfa_megatron.recurrence import dist_conv, dist_scan
from dfa_megatron.sharding import unshard_sequence
from tests.fuzz.attempt import Listens
from tests.support.arguments import arguments
from tests.support.recurrences import Recurrence, recurrence
from tests.support.workers import over_ranks

Leaves = Sequence[torch.Tensor]
Loss = Callable[..., torch.Tensor]


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def curved(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum()


def refuses(loss: Loss, given: Leaves) -> None:
    """First derivatives are the same in every way to ask for them; one of a first derivative raises."""
    wanted = torch.autograd.grad(loss(*given), given)
    for create_graph in (False, True):
        out = loss(*given)
        for _ in range(2):
            found = torch.autograd.grad(out, given, retain_graph=True, create_graph=create_graph)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
    out = loss(*given)
    found = torch.autograd.grad(out, given, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        (out + torch.stack([x.square().sum() for x in found]).sum()).backward()
    loss(*given).backward(create_graph=True)
    for x in given:
        assert x.grad is not None
        x.grad.detach_().zero_()


def attention(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
    more = {"sinks": sinks[0]} if sinks else {}
    given = arguments(causal=True, **more)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = dfa_megatron.dist_flash_attn_func(q, k, v, **given)
        assert isinstance(out, torch.Tensor)
        return out

    if way == "operator":
        with Listens():
            return curved(run(q, k, v))
    return curved(run(q, k, v))


@pytest.mark.parametrize("way", ["plain", "operator"])
def test_attention_drops_no_second_derivative(way: str) -> None:
    shape = (1, 6, 2, 8)
    refuses(lambda *x: attention(way, *x), leaves(shape, shape, shape))
    refuses(lambda *x: attention(way, *x), leaves(shape, shape, shape, (2,)))
    q, k, v = leaves(shape, shape, shape)
    refuses(lambda q: attention(way, q, k.detach(), v.detach()), [q])
    refuses(lambda s: attention(way, q.detach(), k.detach(), v.detach(), s), leaves((2,)))
    # A gradient that comes with a history of its own.
    refuses(lambda v: attention(way, q.detach(), k.detach(), v).square(), [v])


@pytest.mark.parametrize("way", ["plain", "operator"])
def test_attention_is_linear_in_values_alone(way: str) -> None:
    q, k, v = leaves(*[(1, 6, 2, 8)] * 3)
    out = attention(way, q.detach(), k.detach(), v)
    (found,) = torch.autograd.grad(out, v, create_graph=True)
    out.backward()
    assert not found.requires_grad
    assert v.grad is not None
    assert torch.equal(found, v.grad)


WRAPPED: dict[str, tuple[Callable[..., Loss], str]] = {
    "compiled": (partial(torch.compile, backend="aot_eager", fullgraph=True), "double backward|second derivative"),
    "recomputed": (
        lambda run: partial(torch.utils.checkpoint.checkpoint, run, use_reentrant=False, context_fn=remat.context_fn),
        "second derivative",
    ),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_attention_in_a_graph_or_a_recompute_drops_no_second_derivative(way: str) -> None:
    wrap, match = WRAPPED[way]
    given = leaves(*[(1, 6, 2, 8)] * 3)
    out = curved(wrap(lambda *qkv: dfa_megatron.dist_flash_attn_func(*qkv, causal=True))(*given))
    (found,) = torch.autograd.grad(out, given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=match):
        (out + found.square().sum() if way == "compiled" else found.square().sum()).backward()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_tiled_loss_drops_no_second_derivative(softcap: float | None) -> None:
    labels = torch.arange(8) % 5

    def whole(hidden: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        head = Head(weight=weight, bias=bias[0] if bias else None, softcap=softcap)
        return cross_entropy(hidden, head, labels, tile=3)

    def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = token_scores(hidden, Head(weight=weight, softcap=softcap), labels, tile=3, entropy=True)
        assert found.entropy is not None
        return curved(found.logprobs + found.entropy)

    hidden, weight, bias = leaves((8, 4), (5, 4), (5,))
    for given in ([hidden, weight], [hidden, weight, bias]):
        refuses(whole, given)
    refuses(scores, [hidden, weight])
    refuses(lambda x: whole(x, weight.detach()), [hidden])
    refuses(lambda w: whole(hidden.detach(), w), [weight])


def _scanned(whole: Recurrence, names: list[str], offsets: tuple[int, ...] | None, *x: torch.Tensor) -> torch.Tensor:
    tokens = dict(zip(names, x, strict=True))
    return curved(dist_scan(whole.scan, tokens, decay=whole.decay(tokens), cu_seqlens=offsets)[0])


@over_ranks(2)
def test_nothing_between_ranks_drops_a_second_derivative(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)
    for kind, offsets in (("gla", (0, 2, 3 * ranks)), ("gated_delta", None)):
        whole = recurrence(kind, 3 * ranks, seed=1)
        mine = whole.rows(rank, ranks)
        refuses(partial(_scanned, whole, list(mine), offsets), list(mine.values()))
    x, weight = leaves((1, 4, 3), (3, 1, 3))

    def conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return curved(dist_conv(lambda y, _: _convolved(y, weight), x, 3).tanh())

    refuses(conv, [x, weight])
    refuses(lambda x: curved(unshard_sequence(x, dim=1).tanh()), [x])
    refuses(lambda q, k, v: attention("plain", q, k, v), leaves(*[(1, 4, 2, 8)] * 3))


def _convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv1d(F.pad(x.mT, (weight.shape[2] - 1, 0)), weight, groups=3).mT
