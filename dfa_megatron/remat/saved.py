"""One attention's (out, lse) between a first pass and its recompute: on its device, or in host memory meanwhile.

In host memory (`HostKept`) they travel beside the computation, on two streams of their own:

    first pass   attention ---- proj - mlp | next layer ...        out starts at once, in pinned memory
    to the host           [ out, lse -> ]
    backward     ... layer above, its recompute and backward | take
    to the device         [ -> out, lse ]                          in starts when the layer above takes its own

The pair that was kept last stays on the device until another one is kept, because the backward pass begins with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _versions(pair: Pair) -> tuple[int | None, ...]:
    return tuple(None if kept.is_inference() else kept._version for kept in pair)


class Kept:
    """(out, lse), detached, in the memory that attention wrote them to; an in-place change does not pass unseen."""

    __slots__ = ("__weakref__", "_pair", "_versions", "bytes")

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        pair = (out.detach(), lse.detach())
        self._pair: Pair | None = pair
        self._versions = _versions(pair)
        self.bytes = sum(kept.numel() * kept.element_size() for kept in pair)

    @property
    def changed(self) -> bool:
        """Whether somebody has written into them since."""
        return self._pair is not None and _versions(self._pair) != self._versions

    def settle(self) -> None:
        """The first pass is over: nobody but the recompute will look at them again."""

    def take(self) -> Pair:
        """Both, ready for the current stream. Called once."""
        assert self._pair is not None
        return self._pair


class HostKept(Kept):
    """The same, kept in pinned host memory; on a CPU in other memory of the CPU, so that every path is one.

    Nobody may write to the pair before it is settled and gone from the device: `changed` says whether somebody did.
    """

    __slots__ = ("_changed", "_down", "_lane", "_next_to_take", "_settled", "_up")

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        super().__init__(out, lse)
        assert self._pair is not None
        self._changed = self._settled = False
        self._lane = _lane(out.device)
        self._down = self._lane.to_host(self._pair)
        self._up: _Moved | None = None
        # A backward pass takes the pairs of a micro-batch in the opposite order.
        self._next_to_take = self._lane.newest
        self._lane.newest = weakref.ref(self)

    @property
    def changed(self) -> bool:
        """Whether somebody has written into them before they were gone from the device."""
        return self._changed or super().changed

    def settle(self) -> None:
        """Let the pair that was settled before this one go from the device."""
        if self._settled:
            return
        previous = self._lane.settled()
        if previous is not None:
            previous._changed = previous.changed
            previous._pair = None
        self._lane.settled = weakref.ref(self)
        self._settled = True

    def take(self) -> Pair:
        """Both, on the device and ready for the current stream; starts the way back of the pair that comes next."""
        self._return()
        following = self._next_to_take()
        if following is not None:
            following._return()
        if self._pair is not None:
            return self._pair
        assert self._up is not None
        self._up.wait()
        return self._up.pair

    def _return(self) -> None:
        if self._pair is None and self._up is None:
            self._up = self._lane.to_device(self._down)


@dataclass(frozen=True, slots=True)
class _Moved:
    """A pair on its way or there, and the event after which it is there; None on a CPU."""

    pair: Pair
    arrival: torch.cuda.Event | None

    def wait(self) -> None:
        """Let the current stream wait for it; the host does not."""
        if self.arrival is not None:
            torch.cuda.current_stream(self.pair[0].device).wait_event(self.arrival)


class _Lane:
    """The two streams of a device, and which pairs were kept and settled last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.down: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.up: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.newest: _Reference = _nothing
        self.settled: _Reference = _nothing

    def to_host(self, pair: Pair) -> _Moved:
        """Start the way down; the pair's memory is not given to others before it is done."""
        host = tuple(torch.empty_like(kept, device="cpu", pin_memory=self.down is not None) for kept in pair)
        return self._move(pair, (host[0], host[1]), on_device=pair, stream=self.down)

    def to_device(self, moved: _Moved) -> _Moved:
        """Start the way up of a pair that went down."""
        # Memory of the caller's stream: the stream of copies waits for whatever used it before.
        out, lse = (torch.empty_like(kept, device=self.device) for kept in moved.pair)
        if self.up is not None and moved.arrival is not None:
            self.up.wait_event(moved.arrival)
        return self._move(moved.pair, (out, lse), on_device=(out, lse), stream=self.up)

    @staticmethod
    def _move(source: Pair, target: Pair, *, on_device: Pair, stream: torch.cuda.Stream | None) -> _Moved:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for ours, theirs in zip(target, source, strict=True):
                ours.copy_(theirs, non_blocking=True)
        if stream is None:
            return _Moved(target, None)
        for kept in on_device:
            kept.record_stream(stream)
        return _Moved(target, stream.record_event())


_Reference: TypeAlias = Callable[[], HostKept | None]


def _nothing() -> HostKept | None:
    return None


@cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)
