"""Time the host's part of attentions that are too short to keep a device busy, for a hardware profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.kernel_trial import Given, Trial
from dfa_megatron.doctor.world import slowest
from dfa_megatron.plan.cost.choose import EXCHANGES
from dfa_megatron.plan.cost.hardware import Host
from dfa_megatron.plan.cost.simulate import parts_of
from dfa_megatron.runtime.prepare import build, in_use
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.request import Request
from dfa_megatron.runtime.run import run_backward, run_forward

ROWS = {"cuda": 512, "cpu": 16}
_WARM, _CALLS = 5, 30


def measure_host(kernel: str, shape: Trial) -> Host:
    """Return what the host takes for each part of a run, equal on all ranks; collective over the default group.

    A program of four ranks has a kernel call and a merge in each phase more than one of two, which count as equal.
    """
    world, rows = dist.get_world_size(), ROWS[torch.device(shape.device).type]
    inputs = replace(shape, q_len=rows, kv_len=rows, batch=1).inputs()
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    two, four = (_program(kernel, inputs, ranks) for ranks in (2, 4))
    one, whole = _function(kernel, inputs, alone), _function(kernel, inputs, None)
    prepared = in_use()[-1]
    counts = [parts_of(phase.program) for phase in (prepared.forward, prepared.backward)]
    calls, merges, messages = slowest(map(sum, zip(*counts, strict=True)))
    degree = world if shape.heads % world == 0 else 1
    exchanged = _function(kernel, inputs, None, degree)
    two, four, one, whole, exchanged = slowest((two, four, one, whole, exchanged))
    call = max(0.0, (four - two) / 4)
    run = max(0.0, one / 2 - call)
    message = max(0.0, (whole - 2 * run - (calls + merges) * call) / max(1.0, messages))
    exchange = max(0.0, (exchanged - one) / EXCHANGES) if degree > 1 else message
    return Host(run, call, call, message, exchange)


def _program(kernel: str, inputs: Given, ranks: int) -> float:
    """Time both phases of the last rank's program, without messages."""
    q, k, v, dout = inputs
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=1)
    request = Request(softmax_scale=q.shape[-1] ** -0.5, causal=True, config=config)
    prepared = build(request, ranks, ranks - 1, Inputs(q, k, v))

    @torch.no_grad()
    def call() -> None:
        out, lse = run_forward(prepared, (q, k, v))
        run_backward(prepared, (dout, q, k, v, out, lse))

    return _seconds(call, q.device)


def _function(kernel: str, inputs: Given, group: dist.ProcessGroup | None, degree: int = 1) -> float:
    """Time both phases of the public function."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=degree)

    def call() -> None:
        out = dist_flash_attn_func(*leaves, causal=True, group=group, config=config)
        torch.autograd.grad(out, leaves, inputs[3])

    return _seconds(call, inputs[0].device)


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds until a call has returned, each from an idle device."""
    times = []
    for number in range(_WARM + _CALLS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        slowest([0.0])  # all ranks start together
        start = time.perf_counter()
        call()
        if number >= _WARM:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
