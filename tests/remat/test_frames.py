"""Frames: a recompute takes the attentions of its first pass, whatever runs between the two."""

from __future__ import annotations

import contextlib
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
from torch.utils.checkpoint import set_checkpoint_early_stop

from dfa_megatron import remat
from dfa_megatron.errors import RematError
from dfa_megatron.runtime.counters import COUNTERS

HIDDEN, TOKENS = 8, 6


class Attention(torch.autograd.Function):
    """A stand-in that follows the protocol: ask for the frame, run and record, or take."""

    ran = 0

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        frame = remat.active_frame()
        if frame is None or frame.recording:
            Attention.ran += 1
            scores = q @ k.mT
            lse = scores.logsumexp(-1)
            out = (scores - lse[..., None]).exp() @ v
            if frame is not None:
                frame.record(out, lse)
        else:
            out, lse = frame.take()
            out = out.view_as(out)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        p = (q @ k.mT - lse[..., None]).exp()
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ dout


class Layer(torch.nn.Module):
    """Norm, `attentions` attentions one after another, dropout and an MLP, with residuals."""

    def __init__(self, attentions: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.float64)
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, 3 * HIDDEN, dtype=torch.float64) for _ in range(attentions)
        )
        self.mlp = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv in self.qkv:
            x = x + torch.dropout(Attention.apply(*qkv(self.norm(x)).chunk(3, -1)), self.dropout, self.training)
        return x + torch.dropout(self.mlp(x).tanh(), self.dropout, self.training)


class OwnReentrant(torch.autograd.Function):
    """A framework's checkpoint function, as DeepSpeed's and Megatron's are written."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.rng = run, torch.get_rng_state()
        ctx.devices = [x.device] if x.is_cuda else []
        ctx.device_rng = [torch.cuda.get_rng_state(device) for device in ctx.devices]
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=ctx.devices), torch.enable_grad():
            torch.set_rng_state(ctx.rng)
            for device, state in zip(ctx.devices, ctx.device_rng, strict=True):
                torch.cuda.set_rng_state(state, device)
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


def full_early_stop_off(fn: Callable[..., Any], *args: Any) -> Any:
    """Non-reentrant frames with PyTorch's early stop of the recompute turned off."""
    with set_checkpoint_early_stop(False):
        return non_reentrant(fn, *args)


def non_reentrant(fn: Callable[..., Any], *args: Any) -> Any:
    """The `context_fn` front."""
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=remat.context_fn)


def offloaded(fn: Callable[..., Any], *args: Any) -> Any:
    """The `context_fn` front whose results wait in host memory."""
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=partial(remat.context_fn, offload=True))


FRONTS: dict[str, Callable[..., Any]] = {
    "context_fn": non_reentrant,
    "context_fn without early stop": full_early_stop_off,
    "remat_checkpoint": remat.remat_checkpoint,
    "remat_checkpoint around a framework's own": partial(remat.remat_checkpoint, checkpoint=OwnReentrant.apply),
    "context_fn, offloaded": offloaded,
    "remat_checkpoint, offloaded": partial(remat.remat_checkpoint, offload=True),
}
front = pytest.mark.parametrize("front", FRONTS.values(), ids=FRONTS.keys())
two_fronts = pytest.mark.parametrize(
    "front",
    [non_reentrant, remat.remat_checkpoint, offloaded, partial(remat.remat_checkpoint, offload=True)],
    ids=["context_fn", "reentrant", "context_fn, offloaded", "reentrant, offloaded"],
)


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    """Counts of this test only, and a clean thread after it."""
    Attention.ran = 0
    COUNTERS.reset()
    assert remat.active_frame() is None


def direct(fn: Callable[..., Any], *args: Any) -> Any:
    """No checkpointing."""
    return fn(*args)


def step(layers: list[Layer], how: Callable[..., Any], seed: int) -> list[torch.Tensor]:
    """The output and all gradients of one forward and backward, each layer a region of its own."""
    torch.manual_seed(seed)
    leaf = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    x = leaf
    for layer in layers:
        layer.zero_grad()
        x = how(layer, x)
    (x * torch.randn_like(x)).sum().backward()
    return [x.detach(), leaf.grad, *(p.grad.clone() for layer in layers for p in layer.parameters())]


def make(layers: int, seed: int, **options: Any) -> list[Layer]:
    """Layers with seeded weights."""
    torch.manual_seed(1000 + seed)
    return [Layer(**options) for _ in range(layers)]


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Equal to the bit, and not NaN."""
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"tensor {place} differs by {(a - b).abs().max()}"


@front
@pytest.mark.parametrize("attentions", [1, 2, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_without_checkpointing_to_the_bit(front: Any, attentions: int, dropout: float) -> None:
    layers = make(3, attentions, attentions=attentions, dropout=dropout)
    want = step(layers, direct, seed=7)
    Attention.ran = 0
    assert_same_bits(step(layers, front, seed=7), want)
    assert Attention.ran == 3 * attentions
    assert remat.active_frame() is None


@front
def test_full_recompute_runs_twice_the_attentions_of_remat(front: Any) -> None:
    layers = make(4, 0, attentions=2)
    step(layers, partial(torch_checkpoint, use_reentrant=False), seed=1)
    full, Attention.ran = Attention.ran, 0
    step(layers, front, seed=1)
    assert full == 2 * Attention.ran == 16


@front
def test_what_is_kept_is_out_and_lse_and_nothing_else(front: Any) -> None:
    layers = make(2, 3, attentions=2)
    step(layers, front, seed=2)
    assert COUNTERS.remat_bytes == 4 * (TOKENS * HIDDEN + TOKENS) * 8


@front
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
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


@pytest.mark.parametrize("outer", FRONTS.values(), ids=FRONTS.keys())
@pytest.mark.parametrize("middle", FRONTS.values(), ids=FRONTS.keys())
def test_three_nested_regions_run_an_attention_once(outer: Any, middle: Any) -> None:
    (layer,) = make(1, 13)
    want = step([layer], direct, seed=4)
    Attention.ran = 0
    got = step([layer], lambda fn, x: outer(lambda y: middle(lambda z: non_reentrant(fn, z), y), x), seed=4)
    assert_same_bits(got, want)
    assert Attention.ran == 1


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


def pairs(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.full((2, 3), float(n)), torch.full((2,), -float(n))) for n in range(count)]


def test_a_first_pass_that_is_run_again_starts_anew() -> None:
    first, recompute = remat.context_fn()
    for pair in pairs(2):
        with first:
            remat.active_frame().record(*pair)  # type: ignore[union-attr]
    with recompute:
        out, lse = remat.active_frame().take()  # type: ignore[union-attr]
    assert torch.equal(out, torch.ones(2, 3))
    assert torch.equal(lse, -torch.ones(2))


@pytest.mark.parametrize("failing", ["first pass", "recompute"])
def test_a_pass_that_fails_keeps_nothing(failing: str) -> None:
    first, recompute = remat.context_fn()
    with contextlib.suppress(ZeroDivisionError), first:
        frame = remat.active_frame()
        assert frame is not None
        for pair in pairs(3):
            frame.record(*pair)
        assert frame.kept_bytes == 3 * (6 + 2) * 4
        if failing == "first pass":
            raise ZeroDivisionError
    if failing == "recompute":
        with contextlib.suppress(ZeroDivisionError), recompute:
            remat.active_frame().take()  # type: ignore[union-attr]
            raise ZeroDivisionError
    assert frame.kept_bytes == 0
    with pytest.raises(RematError, match="ran only 0" if failing == "first pass" else "taken before"), recompute:
        remat.active_frame().take()  # type: ignore[union-attr]


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


def test_a_framework_that_skips_checkpointing_runs_attention_as_if_there_were_no_region() -> None:
    layers = make(2, 59)
    want = step(layers, direct, seed=6)
    Attention.ran = 0
    got = step(layers, partial(remat.remat_checkpoint, checkpoint=lambda run, *args: run(*args)), seed=6)
    assert_same_bits(got, want)
    assert Attention.ran == 2
    assert COUNTERS.remat_bytes == 0


def test_a_skipping_framework_inside_a_region_records_in_that_region() -> None:
    layers = make(1, 61)
    want = step(layers, direct, seed=8)
    Attention.ran = 0
    skip = partial(remat.remat_checkpoint, checkpoint=lambda run, *args: run(*args))
    assert_same_bits(step(layers, lambda fn, x: non_reentrant(lambda y: skip(fn, y), x), seed=8), want)
    assert Attention.ran == 1


def test_a_non_reentrant_function_given_as_reentrant_is_right_and_says_once_what_to_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = make(2, 67)
    want = step(layers, direct, seed=9)
    remat._warn_never_recorded.cache_clear()
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
