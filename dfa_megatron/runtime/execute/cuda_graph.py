"""CUDA graphs: one phase of a prepared attention captured once and replayed, where launches cost more than kernels."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from dfa_megatron.runtime.comm.groups import before_destroying

logger = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]


class Captured:
    """One phase, captured with inputs and results in memory of its own.

    Every rank of the group captures and replays at the same calls: the messages are in the graph. The memory of its
    inputs, results and everything between stays taken for as long as this object lives.

    Args:
        run: the phase: tensors in, tensors out, all work issued on the current stream or joined to it.
        inputs: of the first call; later ones have the same shapes and dtypes.
        messages: the phase has some. The graph is given up, for good, before all process groups are destroyed.
    """

    # A graph that an evaluation captured is replayed in training, which may not write to tensors of inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, run: Callable[..., Tensors], inputs: Tensors, messages: bool) -> None:
        self._inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        torch._foreach_copy_(self._inputs, inputs)
        warm = torch.cuda.Stream(inputs[0].device)
        warm.wait_stream(torch.cuda.current_stream(inputs[0].device))
        with torch.cuda.stream(warm):
            for _ in range(2):  # compiles kernels, opens libraries' handles
                run(*self._inputs)
        torch.cuda.current_stream(inputs[0].device).wait_stream(warm)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads go on: NCCL's watchdog asks for the state of events meanwhile.
        with torch.cuda.graph(self._graph, stream=warm, capture_error_mode="thread_local"):
            self._results = run(*self._inputs)
        logger.info("captured a CUDA graph of an attention over %s", tuple(inputs[0].shape))
        if messages:
            _alive.add(self)
            before_destroying(_release)

    def __call__(self, inputs: Tensors) -> Tensors:
        """Replay on the current stream; the results are the caller's."""
        torch._foreach_copy_(self._inputs, inputs)
        self._graph.replay()
        results = tuple(torch.empty_like(x) for x in self._results)
        torch._foreach_copy_(results, self._results)
        return results

    def release(self) -> None:
        """Give the graph up: it cannot be replayed any more."""
        self._graph.reset()


_alive: weakref.WeakSet[Captured] = weakref.WeakSet()


def _release(group: dist.ProcessGroup | None) -> None:
    """NCCL waits, without end, for graphs that hold its messages before it lets go of a communicator."""
    if group is not None:
        return
    torch.cuda.synchronize()
    for captured in _alive:
        captured.release()
