"""Measure links: time symmetric exchanges over each transport, and fit rate and latency."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import slowest
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.comm.communicator import Communicator
from dfa_megatron.runtime.comm.groups import group_name
from dfa_megatron.runtime.comm.registry import channel
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport

logger = logging.getLogger(__name__)

SIZES: Mapping[str, tuple[int, ...]] = {
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    "cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22),
}
"""Bytes of a message, by kind of device."""

_REPETITIONS = 5
_ROW = 4096
"""Bytes of a token for one other rank: 16 heads of 128 in 16 bits."""

Timing = tuple[int, float]
"""(bytes of a message, seconds of the slowest rank)."""


def open_transports(device: torch.device, largest: int) -> dict[str, Transport]:
    """Return every transport that works between all ranks of the default group, by name; collective.

    Args:
        device: of the tensors that are sent.
        largest: bytes of the largest message.
    """
    ours = channel(group_name(None)).transports
    found = {}
    for kind in ("p2p", "copy_engine") if device.type == "cuda" else ("p2p",):
        try:
            found[kind] = ours.get(device, kind)
        except UnsupportedError as error:
            logger.warning("%s is not in the profile: %s", kind, error.why)
            continue
        found[kind].reserve(largest)
    return found


def neighbours(rank: int, size: int, node: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return (to, from) in a ring of the ranks of one node, and in a ring over the nodes; None if there is only one.

    node: ranks per node.
    """
    first, local = rank // node * node, rank % node
    inside = (first + (local + 1) % node, first + (local - 1) % node) if node > 1 else None
    across = ((rank + node) % size, (rank - node) % size) if size > node else None
    return inside, across


def time_exchanges(
    transport: Transport, device: torch.device, ring: tuple[int, int], sizes: Sequence[int]
) -> list[Timing]:
    """Send to the next rank and receive from the previous one, all at once; return the slowest rank's medians;
    collective.
    """
    timings = []
    for nbytes in sizes:
        outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        timings.append((nbytes, _timed(functools.partial(_exchange, transport, outgoing, ring), device, nbytes)))
    return timings


def time_all_to_alls(device: torch.device, node: range, sizes: Sequence[int]) -> list[Timing]:
    """Time an all-to-all in each node, with the copies of a head exchange; collective.

    Returns:
        For each size the bytes that a rank sends to the others together, and the median of the slowest rank.
    """
    group = channel(group_name(None)).subgroup(node).collectives(device)
    timings = []
    for nbytes in sizes:
        rows = max(1, nbytes // _ROW // len(node))
        whole = torch.zeros((rows, len(node), _ROW), dtype=torch.uint8, device=device)
        seconds = _timed(functools.partial(_all_to_all, whole, group), device, nbytes)
        timings.append((rows * (len(node) - 1) * _ROW, seconds))
    return timings


def _timed(call: Callable[[], None], device: torch.device, nbytes: int) -> float:
    """Return (bytes, median of the slowest rank) of a call that moves about `nbytes` on every rank; collective."""
    times = 3 if nbytes >= 1 << 23 else 10
    slowest([0.0])  # all ranks start together
    taken = [stopwatch(call, device, times=times, behind=True) for _ in range(2 + _REPETITIONS)][2:]
    return slowest([statistics.median(taken)])[0]


def fit(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return (latency, bytes per second) of `seconds = latency + bytes / rate`, by least squares of the relative
    errors.

    The latency is not negative: if the fit gives a negative one, it is set to 0 and the rate is fitted alone.
    """
    # Minimise the sum of (latency * u + w * per_byte - 1)^2 with u = 1 / seconds and w = bytes / seconds.
    u, w = [1 / t for _, t in timings], [n / t for n, t in timings]
    uu, uw, ww = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, w), (w, w)))
    determinant = uu * ww - uw * uw
    if determinant > 1e-9 * uu * ww:
        latency, per_byte = (sum(u) * ww - sum(w) * uw) / determinant, (sum(w) * uu - sum(u) * uw) / determinant
        if latency >= 0 and per_byte > 0:
            return latency, 1 / per_byte
    return 0.0, ww / sum(w)


def _exchange(transport: Transport, outgoing: torch.Tensor, ring: tuple[int, int]) -> None:
    to, source = ring
    incoming = transport.arena(outgoing.nbytes, outgoing.device).flat[: outgoing.nbytes]
    transport.start()
    transport.post(-1, lambda _: [Send(to, [outgoing], [0])], [Recv(source, [incoming])])
    transport.land()
    transport.computed(0)
    transport.finish()


def _all_to_all(whole: torch.Tensor, group: Communicator) -> None:
    packet = whole.transpose(0, 1).contiguous()
    landed = torch.empty_like(packet)
    group.all_to_all(landed, packet, []).wait()
    landed.transpose(0, 1).contiguous()
