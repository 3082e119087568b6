"""Hold one attention's (out, lse) between a first pass and its recompute, on its device or in host memory.

`HostKept` copies them to the host and back beside the computation, on two streams of its own:

    first pass   attention ---- proj - mlp | next layer ...        the copy to the host starts at once
    to the host           [ out, lse -> ]
    backward     ... layer above, its recompute and backward | take
    to the device         [ -> out, lse ]                          starts when the layer above takes its own pair

The backward pass begins with the last pair, so that pair stays on the device until another one is saved.
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
    """Hold (out, lse), detached, in the memory that attention wrote, and notice changes in place."""

    __slots__ = ("__weakref__", "_pair", "_versions", "bytes")

    def __init__(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        pair = (out.detach(), lse.detach())
        self._pair: Pair | None = pair
        self._versions = _versions(pair)
        self.bytes = sum(kept.numel() * kept.element_size() for kept in pair)

    @property
    def changed(self) -> bool:
        """Whether the pair was written to since."""
        return self._pair is not None and _versions(self._pair) != self._versions

    def settle(self) -> None:
        """End the first pass: only the recompute will read the pair."""

    def take(self) -> Pair:
        """Return the pair, ready for the current stream. Called once."""
        assert self._pair is not None
        return self._pair


class HostKept(Kept):
    """Hold the pair in pinned host memory. On a CPU it is copied to other memory, so the path is the same.

    The pair must not change before it is settled and released on the device; `changed` tells whether it did.
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
        """Whether the pair was written to before it was released on the device."""
        return self._changed or super().changed

    def settle(self) -> None:
        """Release on the device the pair that was settled before this one."""
        if self._settled:
            return
        previous = self._lane.settled()
        if previous is not None:
            previous._changed = previous.changed
            previous._pair = None
        self._lane.settled = weakref.ref(self)
        self._settled = True

    def take(self) -> Pair:
        """Return the pair on the device, ready for the current stream, and start to copy the next pair back."""
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
    """Hold a pair that is being copied, and the event that ends the copy; on a CPU None."""

    pair: Pair
    arrival: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        if self.arrival is not None:
            torch.cuda.current_stream(self.pair[0].device).wait_event(self.arrival)


class _Lane:
    """Hold the two streams of a device, and refer to the pairs that were saved and settled last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.down: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.up: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.newest: _Reference = _nothing
        self.settled: _Reference = _nothing

    def to_host(self, pair: Pair) -> _Moved:
        """Start the copy to the host; the allocator does not reuse the pair's memory before its end."""
        host = tuple(torch.empty_like(kept, device="cpu", pin_memory=self.down is not None) for kept in pair)
        return self._move(pair, (host[0], host[1]), on_device=pair, stream=self.down)

    def to_device(self, moved: _Moved) -> _Moved:
        """Start the copy of a pair from the host to the device."""
        # The memory is the caller's stream's, so the copying stream waits for its earlier uses.
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
