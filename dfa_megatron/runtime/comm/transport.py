"""Transports: how a step's messages move while its compute runs. One batch per step, in one order on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple

import torch

from dfa_megatron.runtime.comm.memory.arena import Arena


class Send(NamedTuple):
    """A message to a peer, a rank of the group: dense tensors, and their offsets in the peer's arena in bytes."""

    peer: int
    tensors: Sequence[torch.Tensor]
    offsets: Sequence[int] = ()


class Recv(NamedTuple):
    """A message from a peer, a rank of the group: the dense tensors that it fills."""

    peer: int
    tensors: Sequence[torch.Tensor]


Moving = Callable[[], AbstractContextManager[object]]
"""Send PyTorch's operations inside to the queue on which messages move."""

Sends = Callable[[Moving], Sequence[Send]]
"""Return what a batch sends; tensors that are made for it are made inside of a `Moving`."""


class Transport:
    """Moves the messages of one rank of one group; this one moves none, for the plan of one rank.

    Measurements wrap the methods from `start` to `finish`, which a running program calls.

    Attributes:
        generation: changes when reserved memory has moved.
        beside_kernels: messages move while kernels fill the GPU.
        ranks: of the watched group, by the number of a peer; empty where they are the same.
        queued: kernels wait in queues, so it must be told where the compute of a step ends; otherwise it need not be.
        keeps_arena: the arena is the same in every run, unless its generation changes.
        pinned: it must not move, because a captured CUDA graph of the caller holds addresses in it.
        name: for people.
        mark: of the class, called before and after each wait for messages while a call is timed.
    """

    name = "none"
    mark: ClassVar[Callable[[], None] | None] = None

    generation = 0
    beside_kernels = queued = keeps_arena = pinned = False
    ranks: tuple[int, ...] = ()

    def reserve(self, nbytes: int) -> None:
        """Have memory for the next call; all ranks of the group say the same number, at set-up and before each call."""

    def arena(self, nbytes: int, device: torch.device) -> Arena:
        """Return the memory into which one run receives, equally large on every rank; its content is garbage."""
        return Arena.allocate(nbytes, device) if nbytes else _no_bytes(device)

    def where(self) -> tuple[int, tuple[int, ...]]:
        """Return the step that runs now (-1: none) and the ranks that it waits for; another thread may call this."""
        return -1, ()

    def start(self) -> None:
        """Begin a run: the inputs are ready on the caller's stream."""

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        """Start a step's batch once the compute of step `after` is over. A step without messages posts nothing."""

    def land(self) -> None:
        """Order the caller's compute from here on after the batch that was posted last."""

    def computed(self, step: int) -> None:
        """Note that the compute of a step has been issued."""

    def finish(self) -> None:
        """Note that the compute of the last step has been issued."""


@functools.cache
@torch.inference_mode(False)  # it outlives the call that asks for it
def _no_bytes(device: torch.device) -> Arena:
    return Arena.allocate(0, device)
