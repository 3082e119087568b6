"""Time the host's part of attentions that are too short to keep a device busy, for a hardware profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.kernel_trial import Trial
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

Call = Callable[[], object]


def measure_host(kernel: str, shape: Trial) -> Host:
    """Return what the host takes for each part of a run, equal on all ranks; collective over the default group.

    A program of four ranks has a kernel call and a merge in each phase more than one of two, which count as equal.
    """
    device, world = torch.device(shape.device), dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    two, four = (_seconds(_program(kernel, shape, ranks), device) for ranks in (2, 4))
    one = _seconds(_function(kernel, shape, alone, 1), device)
    whole = _seconds(_function(kernel, shape, None, 1), device)
    prepared = in_use()[-1]
    counts = [parts_of(phase.program) for phase in (prepared.forward, prepared.backward)]
    calls, merges, messages = slowest(map(sum, zip(*counts, strict=True)))
    degree = world if shape.heads % world == 0 else 1
    exchanged = _seconds(_function(kernel, shape, None, degree), device)
    two, four, one, whole, exchanged = slowest((two, four, one, whole, exchanged))
    call = max(0.0, (four - two) / 4)
    run = max(0.0, one / 2 - call)
    message = max(0.0, (whole - 2 * run - (calls + merges) * call) / max(1.0, messages))
    exchange = max(0.0, (exchanged - one) / EXCHANGES) if degree > 1 else message
    return Host(run, call, call, message, exchange)


def _tensors(shape: Trial) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v and dout of one rank."""
    rows = ROWS[torch.device(shape.device).type]
    sizes = (
        (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim_v), (shape.heads, shape.head_dim_v),
    )  # fmt: skip
    q, k, v, dout = (
        torch.randn(1, rows, heads, width, device=shape.device, dtype=shape.dtype) for heads, width in sizes
    )
    return q, k, v, dout


def _program(kernel: str, shape: Trial, ranks: int) -> Call:
    """Both phases of the last rank's program, without messages."""
    q, k, v, dout = _tensors(shape)
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=1)
    request = Request(softmax_scale=shape.head_dim**-0.5, causal=True, config=config)
    prepared = build(request, ranks, ranks - 1, Inputs(q, k, v))

    def call() -> object:
        with torch.no_grad():
            out, lse = run_forward(prepared, (q, k, v))
            return run_backward(prepared, (dout, q, k, v, out, lse))

    return call


def _function(kernel: str, shape: Trial, group: dist.ProcessGroup | None, degree: int) -> Call:
    """Both phases of the public function."""
    q, k, v, dout = _tensors(shape)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    config = DistAttentionConfig(kernel=kernel, ulysses_degree=degree)

    def call() -> object:
        out = dist_flash_attn_func(*leaves, causal=True, group=group, config=config)
        assert isinstance(out, torch.Tensor)
        return torch.autograd.grad(out, leaves, dout)

    return call


def _seconds(call: Call, device: torch.device) -> float:
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
