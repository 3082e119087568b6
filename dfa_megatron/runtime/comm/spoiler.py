"""NaN in place of what a call returns after its group was lost, written on the call's own stream.

Once nothing waits for a lost rank any more, calls that were issued before come to an end with whatever lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.kernels.triton.support import triton_refusal


class Spoiler:
    """Spoils the results of calls on one device, from the moment at which the group is lost.

    All bits of a number are set: NaN in every floating format, -1 for integers.
    """

    @torch.inference_mode(False)  # it outlives the call that makes it
    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros((), dtype=torch.int32, device=device)
        self._stream, self._raised, self._by_triton = torch.cuda.Stream(device), False, triton_refusal() is None

    def __call__(self, results: Sequence[torch.Tensor]) -> None:
        """Queue a look at the flag behind what computes the results, which are contiguous; it takes microseconds."""
        if self._by_triton:
            from dfa_megatron.kernels.triton.spoil import spoil

            spoil(self._flag, results)
            return
        for x in results:
            words = x.view(-1).view(torch.uint8)
            words.masked_fill_(self._flag > 0, 255)

    def spoil(self) -> None:
        """Raise the flag, on a stream that waits for nothing; any thread may."""
        if not self._raised:
            with torch.cuda.stream(self._stream):
                self._flag.fill_(1)
            self._stream.synchronize()
            self._raised = True
