"""Frames: misuse is refused with the way out, and nothing stays behind after an error or a backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from dfa_megatron import remat
from dfa_megatron.errors import RematError
from tests.remat.regions import FRONTS, HIDDEN, TOKENS, Attention, front, make, non_reentrant, offloaded, two_fronts


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


@two_fronts
def test_a_recompute_that_asks_for_more_is_refused(front: Any) -> None:
    layers = make(2, 29)
    passes = []

    def wavering(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        x = layers[0](layers[1](x)) if len(passes) == 2 else layers[0](x)
        for _ in range(40):  # so many saved tensors that the early stop comes after the second attention
            x = x.tanh()
        return x

    loss = front(wavering, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    with pytest.raises(RematError, match="ran only 1: the recompute took another path"):
        loss.backward()
    assert remat.active_frame() is None


def test_a_recompute_that_asks_for_less_is_refused() -> None:
    layers = make(2, 31)
    passes = []

    def wavering(x: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return layers[0](layers[1](x)) if len(passes) == 1 else layers[0](x)

    loss = remat.remat_checkpoint(wavering, torch.ones(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum()
    with pytest.raises(RematError, match="ran 2 attentions, its recompute only 1"):
        loss.backward()


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
