"""`dfa-megatron doctor --profile`: measure the hardware profile that the planner simulates with, and save it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.doctor.host_probe import measure_host
from dfa_megatron.doctor.kernel_trial import Trial, passes
from dfa_megatron.doctor.link_probe import SIZES, fit, neighbours, open_transports, time_all_to_alls, time_exchanges
from dfa_megatron.doctor.machine import devices, versions
from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import join, slowest
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import select
from dfa_megatron.kernels.api import BlockKernel
from dfa_megatron.plan.cost import profile as profiles
from dfa_megatron.plan.cost.hardware import Hardware, Link
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, form_of

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 128, 256, 512)}
_WARM, _MOST_BEFORE = 0.15, 200
"""Seconds that a GPU computes before calls are timed, and the most calls: in training a GPU never rests."""
_TINY = 16
"""Tokens of the call that measures the cost of a launch."""


def measure_and_save(shape: Trial, path: Path, kernels: Sequence[str] = (), *, as_json: bool = False) -> int:
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
    kernel = select(kernels[0] if kernels else "auto", shape.need())
    hardware, measured = measure(kernel, shape, path.stem)
    if world.rank == 0:
        profiles.save(hardware, path)
        print(json.dumps(measured, indent=1) if as_json else f"{table(hardware, measured)}\nsaved {path}")
    world.leave()
    return 0


def measure(kernel: BlockKernel, shape: Trial, name: str) -> tuple[Hardware, dict[str, Any]]:
    """Return the profile, and the raw figures it was made from; collective over the default group."""
    device = torch.device(shape.device)
    overhead, timings = kernel_timings(kernel, shape, LENGTHS[device.type])
    curves: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for row in timings:
        # What a simulated call takes, the cost of a launch and its arithmetic, is then what was measured.
        seconds = max(row["seconds"] - overhead, row["seconds"] / 2)
        curves[row["phase"]].append((row["pairs"] ** 0.5, row["operations"] / seconds))
    node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    links, network, nodes, exchanges = _links(device, node, SIZES[device.type])
    several, all_to_alls = _all_to_all(device, node, SIZES[device.type])
    forward, backward = (tuple(sorted(curves[phase])) for phase in ("forward", "backward"))
    hardware = Hardware(name, forward, backward, links, overhead, nodes, network, several)
    if device.type == "cuda":  # a CPU computes where it issues
        count = torch.cuda.get_device_properties(device).multi_processor_count
        hardware = replace(hardware, host=measure_host(kernel.name, shape), multiprocessors=count)
    measured = {
        "versions": versions(), "devices": devices(), "kernel": kernel.name,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": str(shape.dtype),
        "launch_overhead": overhead, "blocks": timings, "exchanges": exchanges, "all_to_alls": all_to_alls,
    }  # fmt: skip
    return hardware, measured


def kernel_timings(kernel: BlockKernel, shape: Trial, lengths: tuple[int, ...]) -> tuple[float, list[dict[str, Any]]]:
    """Return (seconds of a nearly empty call, one row for each length, mask and phase) of the slowest rank."""
    overhead = _timed(kernel, replace(shape, q_len=_TINY, kv_len=_TINY, band=FULL))["forward"]
    rows = []
    for length in lengths:
        for band in (CAUSAL, FULL):
            block = replace(shape, q_len=length, kv_len=length, band=band)
            if kernel.refusal(block.need()) is None:
                about = {"mask": form_of(band, length, length), "length": length, "pairs": block.pairs}
                rows += [
                    {"phase": phase, **about, "operations": block.operations(phase), "seconds": seconds}
                    for phase, seconds in _timed(kernel, block).items()
                ]
    return overhead, rows


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


def _links(
    device: Any, node: int, sizes: tuple[int, ...]
) -> tuple[tuple[Link, ...], Link | None, int | None, list[dict[str, Any]]]:
    """Return (links inside a node, link between nodes, ranks per node or None, raw timings)."""
    inside, across = neighbours(dist.get_rank(), dist.get_world_size(), node)
    links, network, raw = [], None, []
    for transport_name, transport in open_transports(device, max(sizes)).items():
        for where, ring in (("node", inside), ("network", across)):
            if ring is None:
                continue
            timings = time_exchanges(transport, device, ring, sizes)
            latency, rate = fit(timings)
            raw += [
                {"transport": transport_name, "where": where, "bytes": nbytes, "seconds": seconds}
                for nbytes, seconds in timings
            ]
            if where == "node":
                links.append(Link(transport_name, rate, latency))
            else:
                network = Link(transport_name, rate, latency)
    if not links:
        assert network is not None, "there are two ranks or more"
        links = [network]
    return tuple(links), network, node if network is not None else None, raw


def _all_to_all(device: Any, node: int, sizes: tuple[int, ...]) -> tuple[float | None, list[dict[str, Any]]]:
    """Return (bytes per second that a rank sends to the others of its node at once, raw timings), or (None, [])."""
    if node < 2:
        return None, []
    first = dist.get_rank() // node * node
    timings = time_all_to_alls(device, range(first, first + node), sizes)
    return fit(timings)[1], [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in timings]


def table(hardware: Hardware, measured: dict[str, Any]) -> str:
    """Format the measured figures for people."""
    shape = f"{measured['heads']} heads on {measured['kv_heads']} of {measured['head_dim']}"
    lines = [f"{hardware.name}: {measured['kernel']}, {measured['dtype'].removeprefix('torch.')}, {shape}"]
    lines.append("  tokens   mask       forward  backward   TFLOP/s")
    rates: dict[tuple[int, str], dict[str, float]] = {}
    for row in measured["blocks"]:
        rates.setdefault((row["length"], row["mask"]), {})[row["phase"]] = row["operations"] / row["seconds"] / 1e12
    for (length, mask), rate in rates.items():
        lines.append(f"  {length:>6}   {mask:<8}{rate['forward']:>10.3g}{rate['backward']:>10.3g}")
    lines.append(f"  launch overhead {hardware.launch_overhead * 1e6:.1f} us")
    places = [("link", link) for link in hardware.links] + ([("network", hardware.network)] if hardware.network else [])
    for place, link in places:
        speed = f"{link.bytes_per_second / 1e9:.3g} GB/s each way"
        lines.append(f"  {place} {link.transport}: {speed}, latency {link.latency * 1e6:.1f} us")
    host = {name: 1e6 * seconds for name, seconds in asdict(hardware.host).items() if seconds}
    if host:
        lines.append("  host, us: " + ", ".join(f"{name} {us:.0f}" for name, us in host.items()))
    if hardware.all_to_all is not None:
        lines.append(f"  all-to-all of a node: {hardware.all_to_all / 1e9:.3g} GB/s out of a rank")
    return "\n".join(lines)
