"""The state that the watchdog's thread asks the streams for."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from dfa_megatron.runtime.comm import streams as streams_module
from dfa_megatron.runtime.comm.streams import StreamTransport


@pytest.mark.parametrize(("capturing", "where"), [(False, (1, (3,))), (True, (-1, ()))])
def test_events_of_a_graph_are_never_queried(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, where: tuple[int, tuple[int, ...]]
) -> None:
    """Step 0 is over and step 1 waits for rank 3; in a capture every query is an error of CUDA."""
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    monkeypatch.setattr(streams_module, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    over = iter((True, False))

    def query() -> bool:
        if capturing:
            raise RuntimeError("CUDA error: invalid argument")
        return next(over)

    monkeypatch.setattr(torch.cuda, "Event", lambda: MagicMock(query=query))
    streams = StreamTransport(torch.device("cuda", 0))
    streams.start()
    for step, awaited in enumerate(((2,), (3,))):
        streams.awaited[streams.steps] = awaited
        streams.computed(step)
    assert streams.where() == where
