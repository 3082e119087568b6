"""Hold tensors between a first pass and its recompute, on their device or in host memory.

A region saves its input, and the (out, lse) of each attention. `HostKept` copies them to the host and back beside the
computation, on two streams of its own:

    first pass   | attention ---- proj - mlp | next layer ...       a copy to the host starts at once
    to the host  [ input -> ] [ out, lse -> ]
    backward     ... layer above, its recompute and backward | take input, take (out, lse)
    to the device     [ -> out, lse ] [ -> input ]                  starts when the layer above takes its own

The backward pass begins with what was saved last, so the last two stay on the device until others are saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from dfa_megatron.errors import RematError

KeptTensors: TypeAlias = tuple[torch.Tensor, ...]

_OF_A_REGION = 2
"""How many are saved by a region of one attention, its input and (out, lse): as many stay, and come back ahead."""


def _versions(tensors: KeptTensors) -> tuple[int | None, ...]:
    return tuple(None if kept.is_inference() else kept._version for kept in tensors)


class Kept:
    """Hold tensors, detached, in their own memory, and notice changes in place."""

    __slots__ = ("__weakref__", "_tensors", "_versions", "bytes")

    def __init__(self, *tensors: torch.Tensor) -> None:
        kept = tuple(x.detach() for x in tensors)
        self._tensors: KeptTensors | None = kept
        self._versions = _versions(kept)
        self.bytes = sum(x.numel() * x.element_size() for x in kept)

    @property
    def changed(self) -> bool:
        """Whether a tensor was written to since."""
        return self._tensors is not None and _versions(self._tensors) != self._versions

    def settle(self) -> None:
        """End the first pass: only the recompute will read the tensors."""

    def take(self) -> KeptTensors:
        """Return the tensors, ready for the current stream."""
        assert self._tensors is not None
        return self._tensors


class HostKept(Kept):
    """Hold tensors in pinned host memory. On a CPU they are copied to other memory, so the path is the same.

    They must not change before they are settled and released on the device; `changed` tells whether they did.
    """

    __slots__ = ("_changed", "_down", "_lane", "_next_to_take", "_settled", "_up")

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        assert self._tensors is not None
        self._changed = self._settled = False
        self._lane = _lane(tensors[0].device)
        self._down = self._lane.to_host(self._tensors)
        self._up: _Moved | None = None
        # A backward pass takes what a micro-batch saved in the opposite order, but for a region's own two.
        self._next_to_take = self._lane.newest
        self._lane.newest = weakref.ref(self)

    @property
    def changed(self) -> bool:
        """Whether a tensor was written to before it was released on the device."""
        return self._changed or super().changed

    def settle(self) -> None:
        """Release on the device what was settled some before this one."""
        if self._settled:
            return
        self._settled = True
        self._lane.settled.append(weakref.ref(self))
        if len(self._lane.settled) > _OF_A_REGION:
            oldest = self._lane.settled.popleft()()
            if oldest is not None:
                oldest._changed = oldest.changed
                oldest._tensors = None

    def take(self) -> KeptTensors:
        """Return the tensors on the device, ready for the current stream, and start to copy the next ones back."""
        self._return()
        following = self._next_to_take()
        for _ in range(_OF_A_REGION):
            if following is not None:
                following._return()
                following = following._next_to_take()
        if self._tensors is not None:
            return self._tensors
        assert self._up is not None
        self._up.wait()
        return self._up.tensors

    def _return(self) -> None:
        if self._tensors is None and self._up is None:
            self._up = self._lane.to_device(self._down)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Hold tensors that are being copied, and the event that ends the copy; on a CPU None."""

    tensors: KeptTensors
    arrival: torch.cuda.Event | None

    def wait(self) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        if self.arrival is not None:
            torch.cuda.current_stream(self.tensors[0].device).wait_event(self.arrival)


class _Lane:
    """Hold the two streams of a device, and refer to what was saved and settled last."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.down: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.up: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self.newest: _Reference = _nothing
        self.settled: deque[_Reference] = deque()

    def to_host(self, tensors: KeptTensors) -> _Moved:
        """Start the copy to the host; the allocator does not reuse the tensors' memory before its end."""
        host = tuple(torch.empty_like(kept, device="cpu", pin_memory=self.down is not None) for kept in tensors)
        return self._move(tensors, host, on_device=tensors, stream=self.down)

    def to_device(self, moved: _Moved) -> _Moved:
        """Start the copy from the host to the device."""
        # The memory is the caller's stream's, so the copying stream waits for its earlier uses.
        back = tuple(torch.empty_like(kept, device=self.device) for kept in moved.tensors)
        if self.up is not None and moved.arrival is not None:
            self.up.wait_event(moved.arrival)
        return self._move(moved.tensors, back, on_device=back, stream=self.up)

    @staticmethod
    def _move(
        source: KeptTensors, target: KeptTensors, *, on_device: KeptTensors, stream: torch.cuda.Stream | None
    ) -> _Moved:
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


_CHANGED = (
    "The input of a rematerialized region was changed in place after the first pass, so the recompute cannot use it. "
    "Replace the in-place operation (such as a residual added in place)."
)


def keeping_inputs_on_host(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint function that saves the inputs of its regions in pinned host memory.

    Args:
        checkpoint: a function that saves a region's inputs by autograd, and nothing else in its first pass: PyTorch's
            two forms, and the re-entrant functions of Megatron-Core, Transformer Engine and DeepSpeed.

    Raises:
        RematError: in the backward, where an input was changed in place since.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_input_to_host, _input_from_host):
            return checkpoint(*args, **kwargs)

    return run


def _input_to_host(x: torch.Tensor) -> torch.Tensor | HostKept:
    if not x.is_floating_point() or x.numel() == 0:  # token ids are small, and often those of all layers
        return x
    kept = HostKept(x)
    kept.settle()
    return kept


def _input_from_host(kept: torch.Tensor | HostKept) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    if kept.changed:
        raise RematError(_CHANGED)
    (x,) = kept.take()
    return x
