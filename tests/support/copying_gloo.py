"""A gloo transport that copies rows from where they lie into its peers' memory, as the copy engines do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dfa_megatron.runtime.comm.transport import Recv, Send, Sends
from dfa_megatron.runtime.comm.transports import GlooTransport


class CopyingGloo(GlooTransport):
    """A message is the bytes of the peer's memory from the first to the last that it fills; it fills no others."""

    kept: torch.Tensor | None = None

    def arena(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the same memory in every call."""
        if self.kept is None:
            self.kept = torch.empty(1 << 22, dtype=torch.uint8, device=device)
        assert nbytes <= self.kept.numel()
        return self.kept

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Send what the copies would have written."""
        self._filled = [(_range(recv), recv) for recv in receives]
        images = [Recv(recv.peer, [torch.empty(hi - lo, dtype=torch.uint8)]) for (lo, hi), recv in self._filled]
        self._images = [image.tensors[0] for image in images]
        super().post(after, lambda _: [Send(s.peer, [_image(s)]) for s in sends(False)], images)

    def land(self) -> None:
        super().land()
        for ((lo, _), recv), image in zip(self._filled, self._images, strict=True):
            for x in recv.tensors:
                at = x.data_ptr() - lo
                x.copy_(image[at : at + x.nbytes].clone().view(x.dtype).view(x.shape))
        self._filled, self._images = [], []


def _range(recv: Recv) -> tuple[int, int]:
    return min(x.data_ptr() for x in recv.tensors), max(x.data_ptr() + x.nbytes for x in recv.tensors)


def _image(send: Send) -> torch.Tensor:
    first = min(copy.offset for copy in send.copies)
    last = max(copy.offset + (copy.height - 1) * copy.wide + copy.width for copy in send.copies)
    image = torch.full((last - first,), 0xAB, dtype=torch.uint8)
    for x, copy in zip(send.tensors, send.copies, strict=True):
        source = x.detach().view(-1).view(torch.uint8)
        for run in range(copy.height):
            to, at = copy.offset - first + run * copy.wide, copy.skip + run * copy.pitch
            image[to : to + copy.width] = source[at : at + copy.width]
    return image
