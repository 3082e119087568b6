"""What a benchmark compares: a method takes a rank's q, k, v and gives its out; ours and the bare kernels are here.

A bare kernel is an attention of one process: the roof of every method, and what the all-to-all methods call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.attention.ablation import Ablation
from benchmarks.attention.ablation import ablation as ablated
from benchmarks.attention.job import Job, Problem
from dfa_megatron import kernels
from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.world import World
from dfa_megatron.kernels import BlockCall, BlockKernel, Need, Saved
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from dfa_megatron.runtime.prepare import Prepared, in_use

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, local_seq, heads, head_dim) and kv_heads of k and v -> out like q; differentiable."""

Start = Callable[[Problem, int, World, ExitStack], Attention]
"""(problem, local_seq, world, stack) -> the attention; what it enters in the stack is left when the cell is done.

It raises UnsupportedError, or whatever the package raises, where the method does not serve the problem.
"""


Split = Callable[[torch.Tensor, World], torch.Tensor]
"""(batch, seq, ...) of all ranks -> (batch, local_seq, ...) of this one."""


def contiguous(x: torch.Tensor, world: World) -> torch.Tensor:
    """Return the rank's slice, in order."""
    return x.chunk(world.size, dim=1)[world.rank]


def zigzag(x: torch.Tensor, world: World, together: int = 1) -> torch.Tensor:
    """Return chunks r and 2R-1-r of 2R for each of R sets of neighbours, who divide them in order."""
    sets, position = world.size // together, world.rank // together
    chunks = x.chunk(2 * sets, dim=1)
    pair = torch.cat((chunks[position], chunks[2 * sets - 1 - position]), dim=1)
    return pair.chunk(together, dim=1)[world.rank % together]


@dataclass(frozen=True, slots=True)
class Method:
    """One competitor.

    kind: "ours"; "baseline"; "kernel", bare, on one GPU; or "ablation", which shows the cost of a part of ours.
    split: the tokens a rank holds.
    note: what the table says beside the name.
    exact: False where a wrong answer is intended; it is timed without a check, and no result of the project.
    around: entered around each forward and its backward, outside the clock.
    took: after a call, what "auto" came to, or "".
    held: after a call, bytes of the device that it needs past PyTorch's allocator.
    """

    name: str
    kind: Literal["ours", "baseline", "kernel", "ablation"]
    start: Start
    split: Split = contiguous
    note: str = ""
    exact: bool = True
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    took: Callable[[], str] = str
    held: Callable[[], int] = int


def our_methods(job: Job) -> list[Method]:
    """Return every combination of the flags that describe our attention."""
    many = itertools.product(job.schedule, job.kernel, job.transport, job.ulysses_degree, job.ablation)
    return [_ours(*one) for one in many]


def _ours(schedule: str, kernel: str, transport: str, ulysses_degree: str, ablation: Ablation) -> Method:
    layout = "zigzag" if schedule == "zigzag" else "contiguous"
    degree = int(ulysses_degree) if ulysses_degree.isdigit() else ulysses_degree
    options: dict[str, Any] = {"kernel": kernel, "ulysses_degree": degree}
    if layout == "contiguous":
        options["schedule"] = schedule
    words = ["dfa", schedule, kernel]
    if transport != "auto":
        options["transport"] = transport
        words.append(transport)
    if ulysses_degree != "auto":
        words.append(f"ulysses{ulysses_degree}")
    if ablation != "none":
        words.append(ablation)
    config = DistAttentionConfig(**options)

    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        attend: Any = functools.partial(dist_flash_attn_func, causal=problem.causal, layout=layout, config=config)
        return attend

    return Method(
        name=" ".join(words),
        kind="ours" if ablation == "none" else "ablation",
        start=start,
        split=zigzag if layout == "zigzag" else contiguous,
        note="not checked: its answer is meant to be wrong" if ablation == "no_communication" else "",
        exact=ablation != "no_communication",
        around=nullcontext if ablation == "none" else functools.partial(ablated, ablation),
        took=_taken if "auto" in (schedule, ulysses_degree) else str,
        held=lambda: symmetric_bytes(in_use()[-1]),
    )


def _taken() -> str:
    """Return what "auto" came to: the schedule, and a degree above 1."""
    last = in_use()[-1]
    degree = last.exchange.heads.degree if last.exchange is not None else 1
    return last.plan.schedule + (f", ulysses {degree}" if degree > 1 else "")


def symmetric_bytes(prepared: Prepared) -> int:
    """Return the bytes that its messages need in memory that PyTorch's allocator does not count."""
    if prepared.over is None or prepared.ranks == 1 or not torch.cuda.is_available():
        return 0
    transport = prepared.over.transports.get(torch.device("cuda", torch.cuda.current_device()), prepared.transport)
    return prepared.arena_bytes if transport.name == "copy_engine" else 0


def kernel_methods(job: Job) -> list[Method]:
    """Return the bare kernels, with which an attention on one GPU is compared."""
    return [_bare(name) for name in job.kernel]


def _bare(kernel: str) -> Method:
    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        return local_attention(kernel, problem, world.device)

    return Method(f"kernel {kernel}", "kernel", start)


def local_attention(kernel: str, problem: Problem, device: torch.device, share: int = 1) -> Attention:
    """Return the differentiable attention of a whole sequence in one process, by one kernel and nothing else."""
    chosen = local_kernel(kernel, problem, device, share)
    band = CAUSAL if problem.causal else FULL
    scale = float(problem.head_dim**-0.5)
    return lambda q, k, v: KernelAttention.apply(q, k, v, chosen, band, scale)  # type: ignore[no-untyped-call]


def local_kernel(
    kernel: str, problem: Problem, device: torch.device, share: int = 1, *, both: bool = False
) -> BlockKernel:
    """Return the kernel of a problem.

    Args:
        kernel: a name, or "auto".
        share: ranks that the heads are divided among.
        both: it computes causal blocks and full ones.

    Raises:
        UnsupportedError: the kernel does not serve the problem.
    """
    need = Need(
        device=device.type,
        dtype=getattr(torch, problem.dtype),
        heads=problem.heads // share,
        kv_heads=max(1, problem.kv_heads // share),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim,
        forms=frozenset({"causal", "full"} if both else {"causal" if problem.causal else "full"}),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    )
    return kernels.select(kernel, need)


class KernelAttention(torch.autograd.Function):
    """A block kernel with its own backward, as an operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: BlockKernel, band: Band, scale: float
    ) -> torch.Tensor:
        """Return the block's out."""
        out, lse = kernel.forward(BlockCall.of(q, k, v, band, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.band, ctx.scale = kernel, band, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        """Return (dq, dk, dv), and None for the rest."""
        q, k, v, out, lse = ctx.saved_tensors
        saved = saved_for(ctx.kernel, dout, out, lse)
        gradients = ctx.kernel.backward(BlockCall.of(q, k, v, ctx.band, ctx.scale), dout, saved)
        return (*(gradient.to(q.dtype) for gradient in gradients), None, None, None)


def saved_for(kernel: BlockKernel, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Saved:
    """Return what a kernel's backward takes of its forward."""
    takes_out = kernel.backward_needs == "out" or kernel.takes_out
    return Saved(lse, out=out) if takes_out else Saved(lse, minus_delta=minus_delta(dout, out))
