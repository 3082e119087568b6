"""Ranks that part, fail, stop or end on two GPUs: every other rank goes on, hears why, and keeps no finite result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime import run
from tests.support.arguments import arguments
from tests.support.workers import run_ranks

TRANSPORTS = ["p2p", "copy_engine"]
AHEAD = 12
"""Calls that a rank issues without waiting for its device."""
QUARTER = {"two calls swapped": 15.0, "kill -9": 15.0, "SIGSTOP": 3.0, "out of memory": 15.0, "does not come": 1.5}
"""Of the timeout of the group. A rank that lives is waited for all of it."""


class Layer:
    """A layer that trains: projections of its rows, attention, a sum."""

    def __init__(self, rank: int, transport: str, group: dist.ProcessGroup) -> None:
        generator = torch.Generator("cuda").manual_seed(rank)
        shapes = (512, 128), (128, 256), (128, 128), (128, 128)
        x, *weights = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        self.x, self.weights, self.group, self.transport = x, [w.requires_grad_() for w in weights], group, transport

    def forward(self, scale: float = 0.1) -> torch.Tensor:
        q, k, v = ((self.x @ w).view(1, 512, -1, 64) for w in self.weights)
        asked = {"softmax_scale": scale, "transport": self.transport, "schedule": "balanced_shared"}
        out = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, group=self.group, **asked))
        assert isinstance(out, torch.Tensor)
        return out

    def step(self, scale: float = 0.1) -> torch.Tensor:
        """One attention with a backward, issued and not waited for."""
        out = self.forward(scale)
        out.sum().backward()
        return out

    def update(self) -> list[torch.Tensor]:
        """The optimizer's step; the weights before it."""
        before = [w.detach().clone() for w in self.weights]
        with torch.no_grad():
            for w in self.weights:
                assert w.grad is not None
                w -= 0.1 * w.grad
        return before


def swaps(layer: Layer, odd: bool) -> None:
    for scale in (0.1, 0.2) if odd else (0.2, 0.1):
        layer.step(scale)


def ends(how: signal.Signals, layer: Layer, odd: bool) -> None:
    if odd:
        os.kill(os.getpid(), how)


def fails(layer: Layer, odd: bool) -> None:
    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory in this test")

    if odd:
        setattr(run, "_run_or_replay", broken)  # noqa: B010


def is_away(layer: Layer, odd: bool) -> None:
    if odd:
        time.sleep(6 * QUARTER["does not come"])


FAULTS: dict[str, tuple[Callable[[Layer, bool], None], str, str]] = {
    "two calls swapped": (swaps, "forward", "run different attentions"),
    "kill -9": (lambda layer, odd: ends(signal.SIGKILL, layer, odd), "between two calls", "has ended"),
    "SIGSTOP": (lambda layer, odd: ends(signal.SIGSTOP, layer, odd), "between two calls", "gives no sign of life"),
    "out of memory": (fails, "forward", "out of memory in this test"),
    "does not come": (is_away, "between two calls", "is outside of attention"),
}


def _meets(rank: int, ranks: int, fault: str, transport: str, report: str) -> None:
    """Rank 1 meets a fault; both issue calls until they hear of it, and then wait for their devices."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4 * QUARTER[fault]))
    layer = Layer(rank, transport, group)
    for scale in (0.1, 0.2):
        layer.step(scale)
    torch.cuda.synchronize()
    time.sleep(1.5)  # each rank has heard the other
    start, text, outs = time.monotonic(), "", list[torch.Tensor]()
    Path(f"{report}{rank}").write_text(str(time.time()))
    try:
        FAULTS[fault][0](layer, rank == 1)
        outs += [layer.step() for _ in range(AHEAD)]
        torch.cuda.synchronize()
        while time.monotonic() < start + 30:
            layer.step()
            time.sleep(0.05)
    except (DistAttentionError, torch.OutOfMemoryError) as error:
        text = str(error)
    torch.cuda.synchronize()
    finite = [bool(out.isfinite().all()) for out in outs]
    Path(f"{report}{rank}").write_text(f"{time.monotonic() - start:.2f}\n{finite.count(True)}\n{text}")
    time.sleep(2.0)


def described(name: str, where: str, happens: str, seconds: float, transport: str) -> dict[str, object]:
    """What docs/trust.md says of a test."""
    shown = {"p2p": "NCCL", "copy_engine": "copy engines"}[transport]
    return {"fault": name, "where": where, "rank": 1, "happens": happens, "seconds": seconds, "transport": shown}


@pytest.mark.fault
@pytest.mark.gpu(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_other_rank_goes_on_and_hears_why(
    transport: str, fault: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    ended = fault in ("kill -9", "SIGSTOP")
    try:
        run_ranks(2, _meets, fault, transport, f"{tmp_path}/", timeout=60, cuda=True, grace=20.0)
    except AssertionError as error:
        assert ended, error  # noqa: PT017
    _, where, words = FAULTS[fault]
    seconds, finite, *text = (tmp_path / "0").read_text().splitlines()
    assert words in "\n".join(text), text
    if fault not in ("two calls swapped", "out of memory"):
        assert "rank 1 of the group" in "\n".join(text)
    if (transport, fault) != ("p2p", "two calls swapped"):  # NCCL moves the messages of one call for another's
        assert int(finite) == 0, "no call that waited for rank 1 has a finite result"
    within = {"SIGSTOP": QUARTER[fault] + 6, "does not come": 4 * QUARTER[fault] + 4}.get(fault, 12.0)
    assert float(seconds) < within
    record_property("fault", described(fault, where, f"NaN, then {words}", round(float(seconds), 1), transport))


def _last_backward(rank: int, ranks: int, transport: str, report: str) -> None:
    """Rank 1 is killed before the last backward of a training; rank 0 updates its weights and waits for its device."""
    layer = Layer(rank, transport, dist.new_group([0, 1], timeout=timedelta(seconds=60)))
    for _ in range(2):
        layer.step()
        layer.update()
    out = layer.forward()
    torch.cuda.synchronize()
    time.sleep(1.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for w in layer.weights:
        w.grad = None
    out.sum().backward()
    before = layer.update()
    torch.cuda.synchronize()
    changed = [int(((w != b) & w.isfinite()).sum()) for w, b in zip(layer.weights, before, strict=True)]
    Path(report).write_text(f"{changed} {[bool(w.isnan().all()) for w in layer.weights]}")


@pytest.mark.fault
@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_killed_in_the_last_backward_changes_no_weight_of_another_to_a_finite_one(
    transport: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, _last_backward, transport, str(tmp_path / "report"), timeout=60, cuda=True, grace=20.0)
    assert (tmp_path / "report").read_text() == f"{[0, 0, 0]} {[True, True, True]}"


def _slow(rank: int, ranks: int, transport: str) -> None:
    """Rank 1 takes longer than a quarter of the timeout before a call, as a first compilation may."""
    layer = Layer(rank, transport, dist.new_group([0, 1], timeout=timedelta(seconds=24)))
    expected = layer.step().detach().clone()
    if rank == 1:
        time.sleep(9)
    out = layer.step()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.fault
@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_slow_is_waited_for(transport: str) -> None:
    run_ranks(2, _slow, transport, timeout=60, cuda=True)
