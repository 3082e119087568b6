"""Captured phases, over a stand-in for CUDA's graphs: what a graph keeps may be used in every mode."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from dfa_megatron.runtime.execute import cuda_graph as graph


def test_a_graph_that_an_evaluation_captured_serves_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    with torch.inference_mode():
        captured = graph.Captured(lambda x: (2 * x,), (torch.ones(3),), messages=False)
    for inside in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with inside:
            (twice,) = captured((torch.ones(3),))
            assert torch.equal(twice, torch.full((3,), 2.0))
