"""Time the host's part of a forward and a backward: until the calls have returned, before the device is waited for.

    python -m benchmarks.host_time --out host_time.json
    torchrun --nproc-per-node 2 -m benchmarks.host_time        # the calls of real ranks, which may share a GPU
    python -m benchmarks.host_time --device cpu --rows 32 --heads 4 --kv-heads 2 --kernel cpu

Cases, each with its program replayed (`bound`) and run as it stands (`unbound`), in alternating runs:

    program P         one rank's program of P ranks, with a transport that moves nothing
    function          the public function over all ranks of this run, one or more
    cuda_graph        the same with cuda_graph=True, on GPUs
    empty function    an autograd function with the same tensors that computes and sends nothing: PyTorch's own part
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.surroundings import share_gpus
from dfa_megatron import DistAttentionConfig, dist_flash_attn_func
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.plan.interpret import Algebra
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.prepare import build
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.request import Request
from dfa_megatron.runtime.run import HookedRun, hooked, run_backward, run_forward

Call = Callable[[], object]


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "where", choices=("cuda", "cpu"))
    dtype: str = flag("bfloat16", "of the tensors")
    kernel: str = flag("auto", "as in the options")
    rows: int = flag(512, "of each rank")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    ranks: tuple[int, ...] = flag((1, 2, 4, 8), "of the programs that are timed alone")
    rounds: int = flag(5, "alternating runs")
    calls: int = flag(50, "of a run")
    out: Path | None = flag(None, "write the rows as JSON")


class AsItStands:
    """A hook that measures nothing: under it programs are run as they stand."""

    name = "as it stands"

    def wrap(self, run: HookedRun) -> tuple[Algebra, Transport]:
        """Return the run's own."""
        return run.algebra, run.transport


def main() -> None:
    """Time every case both ways and print milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Shapes)
    shapes = from_flags(Shapes, parser.parse_args())
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if shapes.device == "cuda":
        share_gpus(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if world > 1:
        dist.init_process_group("nccl" if shapes.device == "cuda" else "gloo")
    cases = {"function": public(shapes), "empty function": empty(shapes)}
    if shapes.device == "cuda":
        cases["cuda_graph"] = public(shapes, cuda_graph=True)
    if world == 1:
        cases = {f"program {ranks}": program(shapes, ranks) for ranks in shapes.ranks} | cases
    rows = []
    for name, call in cases.items():
        timed: dict[str, list[float]] = {"bound": [], "unbound": []}
        for _ in range(shapes.rounds):
            timed["bound"].append(host_ms(call, shapes))
            with hooked(AsItStands()):
                timed["unbound"].append(host_ms(call, shapes))
        rows.append({"case": name, "world": world} | {way: statistics.median(ms) for way, ms in timed.items()})
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{name:14} of {world}: {rows[-1]['bound']:.3f} ms bound, {rows[-1]['unbound']:.3f} as it stands")
    if shapes.out and (not dist.is_initialized() or dist.get_rank() == 0):
        given = {name: str(value) for name, value in vars(shapes).items()}
        shapes.out.write_text(
            json.dumps({"arguments": given, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


def tensors(shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v and dout of one rank."""
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    dtype = getattr(torch, shapes.dtype)
    q, k, v, dout = (torch.randn(1, shapes.rows, h, shapes.head_dim, device=shapes.device, dtype=dtype) for h in heads)
    return q, k, v, dout


def program(shapes: Shapes, ranks: int) -> Call:
    """Forward and backward of the last rank's program, whose messages go nowhere: numbers of other ranks are noise."""
    q, k, v, dout = tensors(shapes)
    config = DistAttentionConfig(kernel=shapes.kernel, ulysses_degree=1)
    request = Request(softmax_scale=shapes.head_dim**-0.5, causal=True, config=config)
    prepared = build(request, ranks, ranks - 1, Inputs(q, k, v))

    def call() -> object:
        with torch.no_grad():
            out, lse = run_forward(prepared, Inputs(q, k, v))
            return run_backward(prepared, dout, (q, k, v, out, lse, None, None))

    return call


def public(shapes: Shapes, *, cuda_graph: bool = False) -> Call:
    """Forward and backward of the public function over the default group."""
    config = DistAttentionConfig(kernel=shapes.kernel, cuda_graph=cuda_graph)
    return both_ways(shapes, functools.partial(dist_flash_attn_func, causal=True, config=config))


class Empty(torch.autograd.Function):
    """Takes q, k and v and returns q; its gradients are dout and what it saved."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute nothing."""
        ctx.save_for_backward(k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute nothing."""
        return dout, *ctx.saved_tensors


def empty(shapes: Shapes) -> Call:
    """Forward and backward of a function that computes nothing."""
    return both_ways(shapes, Empty.apply)


def both_ways(shapes: Shapes, function: Callable[..., Any]) -> Call:
    """Forward and backward of a function of q, k and v, through PyTorch's autograd."""
    q, k, v, dout = tensors(shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(function(*leaves), leaves, dout)


def host_ms(call: Call, shapes: Shapes) -> float:
    """Return the median milliseconds until a call has returned, each from an idle device."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if shapes.device == "cuda" else lambda: None
    times = []
    for number in range(shapes.calls + 5):
        synchronize()
        if dist.is_initialized():
            dist.barrier()
            synchronize()
        start = time.perf_counter()
        call()
        if number >= 5:
            times.append((time.perf_counter() - start) * 1e3)
    synchronize()
    return statistics.median(times)


if __name__ == "__main__":
    main()
