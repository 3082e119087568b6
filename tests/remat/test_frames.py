"""Frames: a recompute takes the attentions of its first pass, whatever runs between the two."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron import names, remat
from dfa_megatron.errors import RematError
from dfa_megatron.runtime.counters import COUNTERS
from tests.remat.regions import (
    FRONTS,
    HIDDEN,
    TOKENS,
    Attention,
    direct,
    front,
    make,
    non_reentrant,
    offloaded,
    step,
    two_fronts,
)
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


# Misuse, which is refused with the way out; and nothing stays behind after an error or a backward.


@two_fronts
def test_a_second_backward_is_refused_with_the_way_out(front: Any) -> None:
    (layer,) = make(1, 23)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = front(layer, x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RematError, match=r"second backward.*call backward once"):
        loss.backward()
    assert remat.active_frame() is None
    assert Attention.ran == 1


def of_two_paths(front: Any, longer: int) -> torch.Tensor:
    """The sum of a region that runs two attentions in the pass of this number, and one in the other."""
    layers, passes = make(2, 29), list[int]()

    def wavering(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        x = layers[0](layers[1](x)) if len(passes) == longer else layers[0](x)
        for _ in range(40):  # so many saved tensors that the early stop comes after the second attention
            x = x.tanh()
        return x

    summed: torch.Tensor = front(wavering, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    return summed


@two_fronts
def test_a_recompute_that_asks_for_more_is_refused(front: Any) -> None:
    with pytest.raises(RematError, match="ran only 1: the recompute took another path"):
        of_two_paths(front, longer=2).backward()
    assert remat.active_frame() is None


def test_a_recompute_that_asks_for_less_is_refused() -> None:
    with pytest.raises(RematError, match="ran 2 attentions, its recompute only 1"):
        of_two_paths(remat.remat_checkpoint, longer=1).backward()


@two_fronts
def test_a_result_changed_in_place_is_refused(front: Any) -> None:
    (layer,) = make(1, 37)

    def region(x: torch.Tensor) -> torch.Tensor:
        out = Attention.apply(*layer.qkv[0](x).chunk(3, -1))
        with torch.no_grad():
            out.mul_(0.5)
        return layer.mlp(out)

    loss = front(region, torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    with pytest.raises(RematError, match="changed in place"):
        loss.backward()


@two_fronts
def test_an_exception_in_the_first_pass_leaves_nothing_behind(front: Any) -> None:
    (layer,) = make(1, 41)
    kept: list[weakref.ref[Any]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        out = layer(x)
        kept.append(weakref.ref(remat.active_frame()._region))  # type: ignore[union-attr]
        if len(kept) == 1:
            assert remat.active_frame().kept_bytes > 0  # type: ignore[union-attr]
            raise ZeroDivisionError("mid-way")
        return out

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        front(region, x)
    assert remat.active_frame() is None
    gc.collect()
    assert kept[0]() is None
    Attention.ran = 0
    front(region, x).sum().backward()
    assert Attention.ran == 1


def test_a_recompute_inside_the_first_pass_uses_up_what_was_recorded_before_it() -> None:
    (layer,) = make(1, 73)

    def region(x: torch.Tensor) -> torch.Tensor:
        (inner,) = torch.autograd.grad(layer(x).sum(), x, retain_graph=True)
        return layer(x) + inner

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = non_reentrant(region, x).sum()
    with pytest.raises(RematError, match="taken before"):
        loss.backward()
    assert remat.active_frame() is None


@two_fronts
def test_an_exception_in_the_recompute_restores_the_thread(front: Any) -> None:
    (layer,) = make(1, 43)
    passes = []

    def region(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        out = layer(x)
        if len(passes) == 2:
            raise ZeroDivisionError("mid-way")
        return out * 2

    loss = front(region, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    if front in (non_reentrant, offloaded):
        loss.backward()  # the early stop comes before the failing line
    else:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    assert remat.active_frame() is None


@front
def test_backward_frees_results_without_the_garbage_collector(front: Any) -> None:
    (layer,) = make(1, 47)
    region: list[weakref.ref[Any]] = []
    bytes_seen: list[int] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        out = layer(x)
        frame = remat.active_frame()
        assert frame is not None
        region.append(weakref.ref(frame._region))
        bytes_seen.append(frame.kept_bytes)
        return out * 1.0

    gc.disable()
    try:
        out = front(watched, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True))
        assert region[0]() is not None
        loss = out.sum()
        loss.backward()
        assert bytes_seen[0] == (TOKENS * HIDDEN + TOKENS) * 8
        assert all(later == 0 for later in bytes_seen[1:])
        del out, loss
        assert region[0]() is None
    finally:
        gc.enable()


def test_a_forward_that_is_never_backwarded_is_freed() -> None:
    (layer,) = make(1, 53)
    region: list[weakref.ref[Any]] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        region.append(weakref.ref(remat.active_frame()._region))  # type: ignore[union-attr]
        return layer(x)

    for how in FRONTS.values():
        out = how(watched, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True))
        assert region[-1]() is not None
        del out
        gc.collect()
        assert region[-1]() is None
