"""`dfa-megatron doctor --profile`: measure the hardware profile that the planner simulates with, and save it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
import torch.distributed as dist

from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.kernel_trial import Trial, passes
from dfa_megatron.doctor.link_probe import all_to_all_rate, measure_links
from dfa_megatron.doctor.stopwatch import stopwatch
from dfa_megatron.doctor.world import join, slowest
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import select
from dfa_megatron.kernels.api import BlockKernel
from dfa_megatron.plan.cost.hardware import H200_NVLINK, Hardware, Host, save, to_json
from dfa_megatron.plan.language.geometry import CAUSAL, FULL

LENGTHS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 128, 256, 512)}
_WARM, _MOST_BEFORE = 0.15, 200
"""Seconds that a GPU computes before calls are timed, and the most calls: in training a GPU never rests."""
_TINY = 16
"""Tokens of the call that measures the cost of a launch."""
_SHORT = 512
"""Tokens of a call whose device is done before its host."""


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
