"""Measure links: time symmetric exchanges over each transport, and fit rate and latency."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import slowest
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import Link
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport

logger = logging.getLogger(__name__)

SIZES = {
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    "cpu": (1 << 12, 1 << 16, 1 << 20, 1 << 22),
}
"""Bytes of a message, by kind of device."""

_REPETITIONS = 5
_ROW = 4096
"""Bytes of a token for one other rank: 16 heads of 128 in 16 bits."""

Timing = tuple[int, float]
"""(bytes of a message, seconds of the slowest rank)."""


def measure_links(device: torch.device, node: int) -> tuple[tuple[Link, ...], Link | None]:
    """Return the links in a node of so many ranks, one per transport, and the one between nodes; collective."""
    links, network, sizes = list[Link](), None, SIZES[device.type]
    inside, across = neighbours(dist.get_rank(), dist.get_world_size(), node)
    for name, transport in open_transports(device, max(sizes)).items():
        if inside is not None:
            links.append(Link(name, *fit(time_exchanges(transport, device, inside, sizes))))
        if across is not None:
            network = Link(name, *fit(time_exchanges(transport, device, across, sizes)))
    if not links:
        assert network is not None, "there are two ranks or more"
        links = [network]
    return tuple(links), network


def open_transports(device: torch.device, largest: int) -> dict[str, Transport]:
    """Return every transport that works between all ranks of the default group, for messages of so many bytes."""
    found, over = {}, channel_of(None)
    assert over is not None, "several ranks"
    for kind in ("p2p", "copy_engine") if device.type == "cuda" else ("p2p",):
        try:
            found[kind] = over.transports.get(device, kind)
        except UnsupportedError as error:
            logger.warning("%s is not measured: %s", kind, error.why)
            continue
        found[kind].reserve(largest)
    return found


def neighbours(rank: int, size: int, node: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return (to, from) in a ring of a node's ranks, and in a ring over nodes of so many; None if there is one."""
    first, local = rank // node * node, rank % node
    inside = (first + (local + 1) % node, first + (local - 1) % node) if node > 1 else None
    across = ((rank + node) % size, (rank - node) % size) if size > node else None
    return inside, across


def time_exchanges(
    transport: Transport, device: torch.device, ring: tuple[int, int], sizes: Sequence[int]
) -> list[Timing]:
    """Send to the next rank and receive from the previous one, all at once; collective."""

    def exchange(outgoing: torch.Tensor) -> None:
        incoming = transport.arena(outgoing.nbytes, device).flat[: outgoing.nbytes]
        transport.start()
        transport.post(-1, lambda _: [Send(ring[0], [outgoing], [0])], [Recv(ring[1], [incoming])])
        transport.land()
        transport.computed(0)
        transport.finish()

    return [(size, _timed(exchange, torch.zeros(size, dtype=torch.uint8, device=device))) for size in sizes]


def all_to_all_rate(device: torch.device, node: int) -> float | None:
    """Return bytes per second out of a rank in an all-to-all of its node, with the copies of a head exchange.

    None for nodes of one rank; collective.
    """
    if node < 2:
        return None
    first, timings, over = dist.get_rank() // node * node, [], channel_of(None)
    assert over is not None, "several ranks"
    group = over.subgroup(range(first, first + node)).collectives(device)

    def exchange(whole: torch.Tensor) -> None:
        packet = whole.transpose(0, 1).contiguous()
        landed = torch.empty_like(packet)
        group.all_to_all(landed, packet, []).wait()
        landed.transpose(0, 1).contiguous()

    for size in SIZES[device.type]:
        rows = max(1, size // _ROW // node)
        whole = torch.zeros((rows, node, _ROW), dtype=torch.uint8, device=device)
        timings.append((rows * (node - 1) * _ROW, _timed(exchange, whole)))
    return fit(timings)[0]


def _timed(exchange: Callable[[torch.Tensor], None], sent: torch.Tensor) -> float:
    """Return the median of the slowest rank; collective."""
    times, call = 3 if sent.nbytes >= 1 << 23 else 10, functools.partial(exchange, sent)
    slowest([0.0])  # all ranks start together
    taken = [stopwatch(call, sent.device, times=times, behind=True) for _ in range(2 + _REPETITIONS)][2:]
    return slowest([statistics.median(taken)])[0]


def fit(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return (bytes per second, latency) of `seconds = latency + bytes / rate`: least squares of relative errors.

    A latency that comes out negative is set to 0, and the rate is fitted alone.
    """
    # Minimise the sum of (latency * u + w * per_byte - 1)^2 with u = 1 / seconds and w = bytes / seconds.
    u, w = [1 / t for _, t in timings], [n / t for n, t in timings]
    uu, uw, ww = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, w), (w, w)))
    determinant = uu * ww - uw * uw
    if determinant > 1e-9 * uu * ww:
        latency, per_byte = (sum(u) * ww - sum(w) * uw) / determinant, (sum(w) * uu - sum(u) * uw) / determinant
        if latency >= 0 and per_byte > 0:
            return 1 / per_byte, latency
    return ww / sum(w), 0.0
