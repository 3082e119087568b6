"""Results that wait in host memory: they come back in time and unchanged, and nothing stays when a step is over."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron import dist_flash_attn_func, remat
from dfa_megatron.errors import RematError, UnsupportedError
from dfa_megatron.remat import saved as kept
from dfa_megatron.remat.saved import HostKept
from tests.support.live_bytes import living
from tests.support.workers import by_turns


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What travels, in order: the direction, and the number that the tensors are filled with."""
    seen: list[tuple[str, float]] = []
    down, up = kept._Lane.to_host, kept._Lane.to_device

    def to_host(lane: Any, tensors: Any) -> Any:
        seen.append(("down", tensors[0].flatten()[0].item()))
        return down(lane, tensors)

    def to_device(lane: Any, moved: Any) -> Any:
        seen.append(("up", moved.tensors[0].flatten()[0].item()))
        return up(lane, moved)

    monkeypatch.setattr(kept._Lane, "to_host", to_host)
    monkeypatch.setattr(kept._Lane, "to_device", to_device)
    return seen


def settled(count: int) -> list[HostKept]:
    """Pairs of `count` layers after their first passes, filled with their numbers."""
    pairs = []
    for n in range(count):
        pairs.append(HostKept(torch.full((2, 3), float(n)), torch.full((2,), -float(n))))
        pairs[-1].settle()
    return pairs


def test_the_last_two_stay_and_each_taker_starts_the_way_back_of_the_next_two(moves: list[tuple[str, float]]) -> None:
    pairs = settled(6)
    assert moves == [("down", float(n)) for n in range(6)]
    moves.clear()
    for n in reversed(range(6)):
        out, lse = pairs.pop().take()
        assert torch.equal(out, torch.full((2, 3), float(n)))
        assert torch.equal(lse, torch.full((2,), -float(n)))
        # Those of layers 5 and 4 never left; the two below the taker are on their way before the taker goes on.
        assert moves == [("up", float(m)) for m in range(3, max(n - 3, -1), -1)]


def test_tensors_leave_the_device_when_two_more_are_settled() -> None:
    first, second, third = settled(3)
    assert first._tensors is None
    assert second._tensors is not None
    fourth = HostKept(torch.zeros(1), torch.zeros(1))
    assert second._tensors is not None, "its region may still be at work"
    fourth.settle()
    fourth.settle()
    assert second._tensors is None
    assert third._tensors is not None
    assert fourth._tensors is not None


def test_a_write_is_seen_also_when_the_tensors_have_left() -> None:
    out = torch.zeros(3)
    pair = HostKept(out, torch.zeros(3))
    assert not pair.changed
    out.add_(1)
    pair.settle()
    settled(2)
    assert pair._tensors is None
    assert pair.changed


def test_memory_format_and_bytes_are_kept() -> None:
    out = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    pair = HostKept(out, torch.zeros(2, 3))
    pair.settle()
    settled(2)
    back, _ = pair.take()
    assert torch.equal(back, out)
    assert back.stride() == out.stride()
    assert pair.bytes == (24 + 6) * 4


def test_offload_where_a_compiler_keeps_the_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat, "_tracing", lambda: True)
    with pytest.raises(UnsupportedError, match=r"offload in a region that torch\.compile traces"):
        remat.context_fn(offload=True)


# One step of a small model in one process, in all the ways a step can go.

LAYERS, TOKENS, HEADS, HEAD_DIM = 3, 8, 2, 4
HIDDEN = HEADS * HEAD_DIM


class Layer(torch.nn.Module):
    """Attention with a projection before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.proj = torch.nn.Linear(HIDDEN, HIDDEN)
        self.failing = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, TOKENS, HEADS, HEAD_DIM) for part in self.qkv(x).chunk(3, -1))
        out = dist_flash_attn_func(q, k, v, causal=True)
        assert isinstance(out, torch.Tensor)
        if self.failing == ("recompute" if torch.is_grad_enabled() else "first pass"):
            raise ZeroDivisionError(self.failing)
        return x + self.proj(out.flatten(2)).tanh()


WAYS: dict[str, Callable[..., Any]] = {
    "remat_checkpoint": remat.remat_checkpoint,
    "remat_checkpoint, offloaded": partial(remat.remat_checkpoint, offload=True),
    "context_fn": partial(torch_checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "context_fn, offloaded": remat.keeping_inputs_on_host(
        partial(torch_checkpoint, use_reentrant=False, context_fn=partial(remat.context_fn, offload=True))
    ),
}


def a_step(layers: list[Layer], way: Callable[..., Any], number: int) -> None:
    """Training; every few steps an evaluation, a frozen layer, a failure, a forward without backward, or a re-run."""
    x = torch.randn(1, TOKENS, HIDDEN)
    kind = ("train", "evaluate", "freeze", "first pass", "recompute", "forget", "re-run")[number % 7]
    if kind == "evaluate":
        with torch.no_grad():
            for layer in layers:
                x = way(layer, x)
        return
    for layer in layers:
        layer.requires_grad_(not (kind == "freeze" and layer is layers[1]))
    layers[1].failing = kind if kind in ("first pass", "recompute") else ""
    for _ in range(2 if kind == "re-run" else 1):
        hidden = x.clone().requires_grad_()
        with contextlib.suppress(ZeroDivisionError):
            for layer in layers:
                hidden = way(layer, hidden)
            if kind != "forget":
                hidden.square().sum().backward()
    for layer in layers:
        layer.zero_grad(set_to_none=True)


@pytest.mark.support("runtime", "what is kept, in host memory (`remat_offload`)")
@pytest.mark.parametrize("way", by_turns([*WAYS]))
def test_a_hundred_steps_of_every_kind_leave_nothing_behind(way: str) -> None:
    torch.manual_seed(5)
    layers = [Layer() for _ in range(LAYERS)]
    counts = []
    for number in range(120):
        a_step(layers, WAYS[way], number)
        if number in (20, 119):
            counts.append(living())
    assert counts[0] == counts[1]
    assert counts[1]["regions"] == counts[1]["frames"] == counts[1]["pairs"] == 0
    assert remat.active_frame() is None


@pytest.mark.parametrize("way", [name for name in WAYS if "offloaded" in name])
def test_a_regions_input_is_on_the_host_and_a_write_into_it_is_refused(
    way: str, moves: list[tuple[str, float]]
) -> None:
    torch.manual_seed(13)
    layers = [Layer() for _ in range(LAYERS)]
    hidden = torch.full((1, TOKENS, HIDDEN), 0.25, requires_grad=True)
    inputs = []
    for layer in layers:
        inputs.append(hidden)
        hidden = WAYS[way](layer, hidden)
    went = [number for _, number in moves]
    assert len(went) == 2 * LAYERS, "each layer's input, and its (out, lse)"
    assert {x.flatten()[0].item() for x in inputs} <= set(went)
    with torch.no_grad():
        inputs[-1].add_(1)
    with pytest.raises(RematError, match="changed in place"):
        hidden.square().sum().backward()


@pytest.mark.support("runtime", "what is kept, in host memory (`remat_offload`)")
@pytest.mark.gpu
@pytest.mark.parametrize("way", [name for name in WAYS if "offloaded" in name])
def test_on_a_gpu_memory_falls_and_gradients_stay_the_same_to_the_bit(way: str) -> None:
    device, rows, depth = torch.device("cuda"), 1 << 16, 12
    torch.manual_seed(9)

    class Attention(torch.autograd.Function):
        """Stands in for an attention whose results are large and cheap to make."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            frame = remat.active_frame()
            assert frame is not None
            if frame.recording:
                out, lse = x.sin(), x[:, 0].clone()
                frame.record(out, lse)
            else:
                out, lse = frame.take()
            ctx.save_for_backward(x, out, lse)
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
            x, out, lse = ctx.saved_tensors
            return dout * x.cos() + out * lse[:, None]

    weights = torch.randn(depth, 256, 256, device=device, requires_grad=True)
    x = torch.randn(rows, 256, device=device)
    peaks, results = {}, {}
    for name in (way, way.removesuffix(", offloaded")):
        for _ in range(3):  # the first rounds fill the allocators' pools
            weights.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            hidden = x.clone().requires_grad_()
            for weight in weights:
                hidden = WAYS[name](lambda y, weight=weight: Attention.apply(y @ weight * 0.05) @ weight * 0.05, hidden)
            hidden.square().sum().backward()
            torch.cuda.synchronize()
        peaks[name], results[name] = torch.cuda.max_memory_allocated(), weights.grad
    assert torch.equal(*results.values())
    region = rows * (256 + 257) * 4  # its input, and (out, lse)
    saved = peaks[way.removesuffix(", offloaded")] - peaks[way]
    assert saved > (depth - 4) * region * 0.8, f"{saved / region:.1f} of {depth} regions are off the GPU at the peak"


def test_a_second_backward_is_refused_and_its_host_memory_is_free() -> None:
    torch.manual_seed(11)
    (layer,) = (Layer() for _ in range(1))
    loss = remat.remat_checkpoint(layer, torch.randn(1, TOKENS, HIDDEN, requires_grad=True), offload=True).sum()
    kept = [item for item in gc.get_objects() if type(item) is HostKept]
    pairs = [weakref.ref(item) for item in kept if len(item.take()) == 2]  # the other is the input
    del kept
    assert len(pairs) == 1
    loss.backward(retain_graph=True)
    assert pairs[0]() is None
    with pytest.raises(RematError, match="second backward"):
        loss.backward()
