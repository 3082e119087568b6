"""NaN in place of what a call returns after its group was lost, written on the call's own stream.

Once nothing waits for a lost rank any more, calls that were issued before come to an end with whatever lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.kernels.merge import fill_if


class Spoiler:
    """Spoils the results of calls on one device, from the moment at which the group is lost."""

    @torch.inference_mode(False)  # it outlives the call that makes it
    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros((), dtype=torch.int32, device=device)
        self._stream, self._raised = torch.cuda.Stream(device), False

    def __call__(self, results: Sequence[torch.Tensor]) -> None:
        """Queue a look at the flag behind what computes the results; it takes microseconds."""
        fill_if(self._flag, results)

    def spoil(self) -> None:
        """Raise the flag, on a stream that waits for nothing; any thread may."""
        if not self._raised:
            with torch.cuda.stream(self._stream):
                self._flag.fill_(1)
            self._stream.synchronize()
            self._raised = True
