"""`dfa-megatron doctor --profile`: measure the hardware profile that the planner simulates with, and save it.

Rates of kernels by length, and of links: symmetric exchanges over each transport, with a rate and a latency fitted.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
import torch.distributed as dist

from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.kernel_trial import Trial, passes
from dfa_megatron.doctor.world import join, slowest, stopwatch
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import select
from dfa_megatron.kernels.api import BlockKernel
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware, Host, Link, save, to_json
from dfa_megatron.plan.language.geometry import CAUSAL, FULL
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport
from dfa_megatron.runtime.cuda_driver import Copy

logger = logging.getLogger(__name__)

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 128, 256, 512)}
_WARM, _MOST_BEFORE = 0.15, 200
"""Seconds that a GPU computes before calls are timed, and the most calls: in training a GPU never rests."""
_TINY = 16
"""Tokens of the call that measures the cost of a launch."""
_SHORT = 512
"""Tokens of a call whose device is done before its host."""
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


def measure_and_save(shape: Trial, path: Path, kernels: Sequence[str] = ()) -> int:
    """Run `doctor --profile FILE`: every rank measures attention of that shape, rank 0 writes.

    Raises:
        UnsupportedError: it was not started by torchrun with two processes or more, or no kernel serves the shape.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UnsupportedError(
            "doctor --profile with one process",
            "a profile holds the links between ranks",
            f"torchrun --nproc-per-node 2 --no-python dfa-megatron doctor --profile {path}",
        )
    world = join(shape.device)
    shape = replace(shape, device=str(world.device))
    hardware = measure(select(kernels[0] if kernels else "auto", shape.need()), shape, path.stem)
    if world.rank == 0:
        save(hardware, path)
        print(f"{to_json(hardware)}saved {path}")
    world.leave()
    return 0


def measure(kernel: BlockKernel, shape: Trial, name: str) -> Hardware:
    """Return the profile of the slowest rank; collective over the default group."""
    device = torch.device(shape.device)
    overhead = _timed(kernel, replace(shape, q_len=_TINY, kv_len=_TINY, band=FULL))["forward"]
    curves: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for length in LENGTHS[device.type]:
        for band in (CAUSAL, FULL):
            block = replace(shape, q_len=length, kv_len=length, band=band)
            if kernel.refusal(block.need()) is not None:
                continue
            for phase, seconds in _timed(kernel, block).items():
                # What a simulated call takes, the cost of a launch and its arithmetic, is then what was measured.
                computes = max(seconds - overhead, seconds / 2)
                curves[phase].append((block.pairs**0.5, block.operations(phase) / computes))
    node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    links, network = measure_links(device, node)
    forward, backward = (tuple(sorted(curve)) for curve in curves.values())
    nodes, several = node if network else None, all_to_all_rate(device, node)
    hardware = Hardware(name, forward, backward, links, overhead, nodes, network, several)
    if device.type == "cpu":  # it computes where it issues
        return hardware
    host = measure_host(kernel.name, replace(shape, q_len=_SHORT, kv_len=_SHORT))
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(hardware, host=host, multiprocessors=count)


def measure_host(kernel: str, short: Trial) -> Host:
    """Return the parts of a run on the shipped host, scaled to what a short call of one rank takes here; collective."""
    *inputs, dout = short.inputs()
    leaves = [x.requires_grad_() for x in inputs]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    times = []
    for _ in range(20):
        if dout.is_cuda:
            torch.cuda.synchronize(dout.device)
        start = time.perf_counter()
        out = dist_flash_attn_func(*leaves, causal=True, group=alone, config=DistAttentionConfig(kernel=kernel))
        torch.autograd.grad(out, leaves, dout)
        times.append(time.perf_counter() - start)
    usual, taken = H200_NVLINK.host, slowest([statistics.median(times[5:])])[0]
    return Host(*(taken / 2 / (usual.run + usual.call) * seconds for seconds in astuple(usual)))


def _timed(kernel: BlockKernel, block: Trial) -> dict[str, float]:
    """Return the median of each phase, of the slowest rank."""
    device = torch.device(block.device)
    times = 3 if device.type == "cpu" or block.operations("forward") > 1e12 else 10
    medians = {}
    for phase, call in passes(kernel, block).items():
        stopwatch(call, device)
        before = min(_MOST_BEFORE, 1 + int(_WARM / stopwatch(call, device))) if device.type == "cuda" else 1
        medians[phase] = statistics.median(
            stopwatch(call, device, times=times, behind=True, before=before) for _ in range(3)
        )
    return dict(zip(medians, slowest(medians.values()), strict=True))


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
    over = channel_of(None)
    assert over is not None, "several ranks"
    found = {}
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
        transport.post(
            -1, lambda _: [Send(ring[0], [outgoing], [Copy(0, 0, outgoing.nbytes)])], [Recv(ring[1], [incoming])]
        )
        transport.land()
        transport.computed(0)
        transport.finish()

    return [(size, _exchange_time(exchange, torch.zeros(size, dtype=torch.uint8, device=device))) for size in sizes]


def all_to_all_rate(device: torch.device, node: int) -> float | None:
    """Return bytes per second out of a rank in an all-to-all of its node, with the copies of a head exchange.

    None for nodes of one rank; collective.
    """
    if node < 2:
        return None
    first, timings = dist.get_rank() // node * node, []
    over = channel_of(None)
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
        timings.append((rows * (node - 1) * _ROW, _exchange_time(exchange, whole)))
    return fit(timings)[0]


def _exchange_time(exchange: Callable[[torch.Tensor], None], sent: torch.Tensor) -> float:
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
