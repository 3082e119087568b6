"""Frames: a recompute takes the attentions of its first pass, whatever runs between the two."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron import names, remat
from dfa_megatron.runtime.counters import COUNTERS
from tests.remat.regions import FRONTS, HIDDEN, TOKENS, Attention, direct, front, make, non_reentrant, step
from tests.support.attend import assert_same_bits


@front
@pytest.mark.parametrize(("attentions", "dropout"), [(1, 0.0), (3, 0.3)])
def test_gradients_are_those_without_checkpointing_to_the_bit(front: Any, attentions: int, dropout: float) -> None:
    layers = make(3, attentions, attentions=attentions, dropout=dropout)
    want = step(layers, direct, seed=7)
    Attention.ran = 0
    assert_same_bits(step(layers, front, seed=7), want)
    assert Attention.ran == 3 * attentions
    assert COUNTERS.remat_bytes == 3 * attentions * (TOKENS * HIDDEN + TOKENS) * 8, "out and lse and nothing else"
    assert remat.active_frame() is None
    step(layers, partial(torch_checkpoint, use_reentrant=False), seed=1)
    assert Attention.ran == 9 * attentions, "full recompute runs twice the attentions"


@front
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_micro_batches_come_back_in_any_order(front: Any, order: tuple[int, ...]) -> None:
    (layer,) = make(1, 5)
    torch.manual_seed(sum(order[:2]))
    batches = [torch.randn(TOKENS + n, HIDDEN, dtype=torch.float64) for n in range(3)]

    def gradients(how: Callable[..., Any]) -> list[torch.Tensor]:
        layer.zero_grad()
        leaves = [batch.clone().requires_grad_() for batch in batches]
        outs = [how(layer, leaf) for leaf in leaves]
        for n in order:
            outs[n].square().sum().backward()
        return [leaf.grad for leaf in leaves] + [p.grad.clone() for p in layer.parameters()]

    want = gradients(direct)
    Attention.ran = 0
    assert_same_bits(gradients(front), want)
    assert Attention.ran == 3


@pytest.mark.parametrize("outer", FRONTS.values(), ids=FRONTS.keys())
@pytest.mark.parametrize("inner", FRONTS.values(), ids=FRONTS.keys())
def test_an_attention_in_nested_regions_runs_once(outer: Any, inner: Any) -> None:
    layers = make(4, 11, attentions=2, dropout=0.2)

    def nested(x: torch.Tensor) -> torch.Tensor:
        return layers[3](inner(layers[2], inner(layers[1], layers[0](x))))

    def gradients(how: Callable[..., Any]) -> list[torch.Tensor]:
        return step(layers, lambda layer, x: how(nested, x) if layer is layers[0] else x, seed=3)

    def plain(_: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    want = gradients(plain)
    Attention.ran = 0
    assert_same_bits(gradients(outer), want)
    assert Attention.ran == 8


@front
def test_evaluation_keeps_nothing(front: Any) -> None:
    (layer,) = make(1, 17)
    seen = []
    handle = layer.register_forward_hook(lambda *_: seen.append(remat.active_frame()))
    with torch.no_grad():
        front(layer, torch.randn(TOKENS, HIDDEN, dtype=torch.float64))
    with torch.inference_mode():
        front(layer, torch.randn(TOKENS, HIDDEN, dtype=torch.float64))
    handle.remove()
    assert seen == [None, None]
    assert COUNTERS.remat_bytes == 0


def test_an_attention_outside_of_regions_sees_no_frame() -> None:
    layers = make(2, 19)
    step(layers, lambda layer, x: layer(x) if layer is layers[0] else non_reentrant(layer, x), seed=5)
    assert Attention.ran == 2
    assert COUNTERS.remat_bytes == (TOKENS * HIDDEN + TOKENS) * 8


def test_a_thread_sees_only_its_own_frames() -> None:
    seen: list[Any] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: seen.append(remat.active_frame()))
        thread.start()
        thread.join()
        seen.append(remat.active_frame())
        return x * 2

    non_reentrant(region, torch.ones(2, requires_grad=True))
    assert seen[0] is None
    assert seen[1] is not None


def test_a_framework_that_skips_checkpointing_runs_attention_as_if_there_were_no_region() -> None:
    layers = make(2, 59)
    want = step(layers, direct, seed=6)
    Attention.ran = 0
    got = step(layers, partial(remat.remat_checkpoint, checkpoint=lambda run, *args: run(*args)), seed=6)
    assert_same_bits(got, want)
    assert Attention.ran == 2
    assert COUNTERS.remat_bytes == 0


def test_a_non_reentrant_function_given_as_reentrant_is_right_and_says_once_what_to_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = make(2, 67)
    want = step(layers, direct, seed=9)
    names.say_once.cache_clear()
    wrong = partial(remat.remat_checkpoint, checkpoint=partial(torch_checkpoint, use_reentrant=False))
    with caplog.at_level(logging.WARNING, logger="dfa_megatron.remat"):
        assert_same_bits(step(layers, wrong, seed=9), want)
        assert_same_bits(step(layers, wrong, seed=9), want)
    assert sum("context_fn" in record.message for record in caplog.records) == 1


def test_a_region_without_attention_may_be_backwarded_twice() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for how in FRONTS.values():
        x.grad = None
        loss = how(lambda y: (y * y).tanh(), x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert torch.equal(x.grad, torch.full_like(x, 4 * (1 - torch.tensor(1.0).double().tanh() ** 2)))


@pytest.mark.gpu
@front
def test_frames_work_on_a_gpu_whose_backward_runs_in_another_thread(front: Any) -> None:
    layers = [layer.cuda() for layer in make(3, 71, attentions=2, dropout=0.3)]

    def gradients(how: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(10)
        x = leaf = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, device="cuda", requires_grad=True)
        for layer in layers:
            layer.zero_grad()
            x = how(layer, x)
        x.square().sum().backward()
        return [leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]

    want = gradients(direct)
    Attention.ran = 0
    assert_same_bits(gradients(front), want)
    assert Attention.ran == 6
