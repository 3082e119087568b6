"""Captured phases, over a stand-in for CUDA's graphs: what a graph keeps may be used in every mode."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock
from weakref import WeakSet

import pytest
import torch

from dfa_megatron.errors import LostGroupError
from dfa_megatron.runtime.execute import captured as graph


def test_a_graph_that_an_evaluation_captured_serves_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    with torch.inference_mode():
        captured = graph.Captured(lambda x: (2 * x,), (torch.ones(3),), [])
    for inside in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with inside:
            (twice,) = captured((torch.ones(3),))
            assert torch.equal(twice, torch.full((3,), 2.0))


@pytest.mark.parametrize("lost", [None, LostGroupError("rank 1 failed")])
def test_a_graph_with_messages_goes_before_its_channel_closes_and_waits_for_no_lost_group(
    monkeypatch: pytest.MonkeyPatch, lost: LostGroupError | None
) -> None:
    events: list[str] = []
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("waits for replays"))
    torch.cuda.CUDAGraph().reset = lambda: events.append("is reset")  # type: ignore[method-assign]
    channel = MagicMock(graphs=WeakSet())
    channel.calls.lost = lost
    kept, dropped = (graph.Captured(lambda x: (2 * x,), (torch.ones(3),), [channel]) for _ in range(2))
    del dropped
    for held in list(channel.graphs):
        held.release()
    assert events == ([] if lost else ["waits for replays"]) + ["is reset"]
    assert kept
