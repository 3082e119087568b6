"""A CUDA graph of a phase spares the host its launches too, for memory of its own and a copy of inputs and results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.execute.wire_format import Fields

logger = logging.getLogger(__name__)


class Captured:
    """One phase, captured with memory of its own for inputs and results, which stays taken while this object lives.

    The messages are in the graph, so every rank of the group captures and replays at the same calls.

    Args:
        run: the phase: tensors in, tensors out, all work issued on the current stream or joined to it.
        inputs: of the first call; later ones have the same shapes and dtypes.
        channels: over which the phase's messages go. The graph is given up before one of them closes.
    """

    # A graph that an evaluation captured is replayed in training, which may not write to tensors of inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, run: Callable[..., Fields], inputs: Fields, channels: Sequence[Channel]) -> None:
        self._inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        self._channels, self._device = channels, inputs[0].device
        torch._foreach_copy_(self._inputs, inputs)
        warm = torch.cuda.Stream(self._device)
        warm.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(warm):
            for _ in range(2):  # compiles kernels, opens libraries' handles
                run(*self._inputs)
        torch.cuda.current_stream(self._device).wait_stream(warm)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on: NCCL's watchdog asks for the state of events meanwhile.
        with torch.cuda.graph(self._graph, stream=warm, capture_error_mode="thread_local"):
            self._results = run(*self._inputs)
        logger.info("captured a CUDA graph of an attention over %s", tuple(inputs[0].shape))
        for channel in channels:
            channel.graphs.add(self)

    def __call__(self, inputs: Fields) -> Fields:
        """Replay on the current stream; the results are the caller's."""
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        results = tuple(torch.empty_like(x) for x in self._results)
        torch._foreach_copy_(results, self._results)
        return results

    def release(self) -> None:
        """Give the graph up: NCCL waits, without end, for graphs with its messages before it closes a communicator.

        The thread that calls this may be another than the one that captured.
        """
        with torch.cuda.device(self._device):
            if all(channel.calls.lost is None for channel in self._channels):  # else a replay may never end
                torch.cuda.synchronize()
            self._graph.reset()
