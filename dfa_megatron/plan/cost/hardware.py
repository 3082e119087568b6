"""Describe machines for the cost model: kernel rates, and links within and between nodes with what they deliver."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.work import ROW, TILE

Curve = tuple[tuple[float, float], ...]
"""A rate by block length: (tokens, floating-point operations per second), tokens increasing."""

RATED_HEADS = 32
"""Heads times batch at which a curve is measured."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host, which issues the work of a rank ahead of its device.

    run: one forward or backward, from the call to the return. call: a kernel call. merge: the merge of a partial.
    message: to post or to receive one. layer: both passes of a layer's other work.
    """

    run: float = 0.0
    call: float = 0.0
    merge: float = 0.0
    message: float = 0.0
    layer: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A link that carries messages; a rank sends so many bytes per second, and at the same time receives as many.

    latency: seconds before the first byte of a message arrives.
    """

    bytes_per_second: float
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that one message takes."""
        return self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Hardware:
    """A profile of one rank, its link to the others, and the network between nodes if there are several.

    Args:
        name: a label for people.
        forward, backward: rate of the attention kernel with RATED_HEADS heads, by the side of a square block with the
            same number of pairs. Between points both axes are interpolated logarithmically. Beyond the last point the
            rate is constant; below the first of several it falls with the length.
        link: between ranks of one node.
        launch_overhead: seconds of the device that every kernel call costs beside its arithmetic.
        ranks_per_node: rank r is on node r // ranks_per_node; None puts all ranks on one node.
        network: the link between nodes. Each rank has its own adapter, which works beside its link.
        host: what a rank's host takes for each part of a run.
        multiprocessors: of a GPU. Each computes TILE rows of a head at once, so few heads with few rows leave some
            idle. 0: any work uses all of the device.
    """

    name: str
    forward: Curve
    backward: Curve
    link: Link
    launch_overhead: float = 0.0
    ranks_per_node: int | None = None
    network: Link | None = None
    host: Host = Host()
    multiprocessors: int = 0

    def node_size(self, ranks: int) -> int | None:
        """Return the ranks per node if so many ranks are on several nodes, else None."""
        return self.ranks_per_node if (self.ranks_per_node or ranks) < ranks else None

    def lead(self, tokens: int, width: int) -> float:
        """Return the seconds by which a host is ahead of its device in the rest of a layer.

        A layer `width` wide has about 12 width² weights, which a forward multiplies once and a backward twice.
        """
        return max(0.0, 2 * 3 * 12 * tokens * width**2 / self.forward[-1][1] - self.host.layer)

    def rate(self, phase: str, pairs: float, queries: int = 0, keys: int = 0, heads: int = RATED_HEADS) -> float:
        """Return operations per second of a kernel call of so many (query, key) pairs of one head.

        Rows take time beside their pairs. So a pack is as fast as its documents, not as a square of all its pairs:
        flash4 within 10 % of what one H100 measured on documents of 1K to 32K tokens.

        queries, keys: their rows; a kernel shares the former among multiprocessors in a forward, the latter in a
        backward. 0: of a square. heads: of queries, times batch.
        """
        curve = self.forward if phase == "forward" else self.backward
        rate, side = curve[0][1], math.sqrt(pairs)
        if len(curve) > 1:
            rate = _interpolate(curve, side)
            of_square = side / math.sqrt(2)  # keys of a row of a causal square with as many pairs
            if 0 < pairs < queries * of_square:
                rate *= (1 + ROW / of_square) / (1 + ROW * queries / pairs)
        if heads == RATED_HEADS or not self.multiprocessors:
            return rate
        rows = queries if phase == "forward" else keys
        return rate * self._used(rows, heads) / self._used(rows, RATED_HEADS)

    def _used(self, rows: int, heads: int) -> float:
        """Return the share of the multiprocessors' time that tiles use."""
        tiles = max(1, -(-rows // TILE)) * heads
        return tiles / (self.multiprocessors * -(-tiles // self.multiprocessors))


def _interpolate(curve: Curve, tokens: float) -> float:
    if tokens <= curve[0][0]:
        return curve[0][1] * max(tokens, 1.0) / curve[0][0]
    for (t0, r0), (t1, r1) in pairwise(curve):
        if tokens < t1:
            return r0 * math.exp(math.log(r1 / r0) * math.log(tokens / t0) / math.log(t1 / t0))
    return curve[-1][1]


def deliver(
    queued: Iterable[tuple[int, int, float, bool]], posted: Sequence[float]
) -> tuple[list[float], dict[tuple[int, int], tuple[float, float]]]:
    """Move the messages of one step; return when each rank has sent and received all of its own, and times by ends.

    On its link to the ranks of its node a rank sends one message at a time and receives one at a time. Its adapter to
    other nodes works the same way, beside it. The message that can start first goes first; lower ranks win a tie.

    queued: source, destination, seconds, and whether it goes to another node. posted: when each rank has its batch.
    """
    times: dict[tuple[int, int], tuple[float, float]] = {}
    ports = [(list(posted), list(posted)) for _ in range(2)]  # (sending, receiving): of links, of adapters
    heap = [(max(posted[src], posted[dst]), src, dst, seconds, far) for src, dst, seconds, far in queued]
    heapq.heapify(heap)
    while heap:
        start, src, dst, seconds, far = heap[0]
        sending, receiving = ports[far]
        now = max(sending[src], receiving[dst])
        if now > start:
            heapq.heapreplace(heap, (now, src, dst, seconds, far))
            continue
        heapq.heappop(heap)
        sending[src] = receiving[dst] = start + seconds
        times[src, dst] = start, start + seconds
    return [max(ends) for ends in zip(*ports[0], *ports[1], strict=True)], times


def flat(flops: float) -> Curve:
    """Return a curve with one rate for blocks of every length."""
    return ((1, flops),)


def _through(*tera: int) -> Curve:
    """Return the curve through these rates at the five lengths that were measured of most kernels."""
    return tuple(zip((724, 2896, 4096, 23170, 32768), [1e12 * rate for rate in tera], strict=True))


RATES: Mapping[str, tuple[Curve, Curve]] = MappingProxyType(
    {
        "flash4": (
            ((724, 507e12), (1448, 564e12), (2896, 585e12), (23170, 634e12), (32768, 667e12)),
            ((724, 277e12), (1448, 408e12), (2896, 463e12), (5793, 580e12), (23170, 609e12), (32768, 614e12)),
        ),
        "cudnn": (_through(290, 335, 468, 580, 596), _through(200, 335, 452, 524, 537)),
        "triton": (_through(266, 307, 400, 463, 445), _through(164, 275, 325, 355, 333)),
        "aten": (_through(197, 227, 326, 334, 338), _through(140, 234, 285, 319, 315)),
    }
)
"""(forward, backward) by kernel, in bfloat16 with 32 heads of 128 on one H200, causal and full blocks of 4K to 32K.
flash4 from 1K causal blocks on: benchmarks/results/2026-11-22-2xh200-profile.json. The shorter blocks of the others
are not measured: they lose as much as those of flash4.
"""


def computing_with(kernel: str | None, hardware: Hardware) -> Hardware:
    """Return a Hopper profile with the rates of another kernel; return any other profile unchanged."""
    if kernel is None or kernel not in RATES or (hardware.forward, hardware.backward) not in RATES.values():
        return hardware
    forward, backward = RATES[kernel]
    return replace(hardware, name=f"{hardware.name}-{kernel}", forward=forward, backward=backward)


_HOPPER = RATES["cudnn"]

_HOST = Host(run=364e-6, call=51e-6, merge=24e-6, message=95e-6, layer=2e-3)
"""Replayed runs. call and merge: least squares over benchmarks/results/2026-11-23-1xh200-host-time.json at commit
508b9ec; a later run is within 0.1 ms. message: the seven of 2026-11-22-2xh200-host-time.json. run: what is left of
2026-11-23-2xh200-host-time.json, which has three. layer: `share` of 2026-11-30-4xh200-layers.json, 1.5 to 2.3 ms.
"""

_GPU: dict[str, Any] = {"launch_overhead": 15e-6, "host": _HOST, "multiprocessors": 132}

H200_NVLINK = Hardware("h200-nvlink", *_HOPPER, Link(340e9, 15e-6), **_GPU)
"""H200s of one host, measured: NCCL send and receive. Writes of copy engines take 390e9 bytes per second."""

H100_NVLINK = replace(H200_NVLINK, name="h100-nvlink")
"""H100 SXM of one host. Uses the H200's figures, because multiprocessors and links are the same; not measured."""

H200_SLOW_LINK = Hardware("h200-slow-link", *_HOPPER, Link(26e9, 30e-6), **_GPU)
"""H200s of one host with the direct link off: what fits benchmarks/results/*-p2p-off-*."""

H200_NIC_400G = replace(H200_NVLINK, name="h200-nic-400g", ranks_per_node=8, network=Link(45e9, 30e-6))
"""Nodes of 8 H200s with a 400 Gb/s adapter per GPU at nine tenths of its 50 GB/s, a usual figure; not measured."""

H200_SOCKETS = replace(H200_NVLINK, name="h200-sockets", ranks_per_node=8, network=Link(2e9, 100e-6))
"""Nodes of 8 H200s whose NCCL sends over TCP sockets at 2 GB/s a GPU, a usual figure."""

CPU_LOOPBACK = Hardware("cpu-loopback", flat(40e9), flat(30e9), Link(1e9, 2e-4), 5e-5)
"""Processes of one small machine over gloo; a rough figure."""

IDEAL_LINK = Hardware("ideal-link", flat(600e12), flat(550e12), Link(math.inf))
"""A machine where only arithmetic costs time: the bound of a schedule whose messages are all hidden."""

_FLASH4 = [computing_with("flash4", hardware) for hardware in (H200_NVLINK, H200_SLOW_LINK)]
_ALL = (H200_NVLINK, H100_NVLINK, H200_SLOW_LINK, H200_NIC_400G, H200_SOCKETS, *_FLASH4, CPU_LOOPBACK, IDEAL_LINK)
PROFILES: Mapping[str, Hardware] = MappingProxyType({profile.name: profile for profile in _ALL})


def profile_named(name: str) -> Hardware:
    """Return a shipped profile by its name, or refuse it with the known ones."""
    if name not in PROFILES:
        raise UnsupportedError(f"hardware {name!r}", "there is no such profile", "one of " + ", ".join(PROFILES))
    return PROFILES[name]
