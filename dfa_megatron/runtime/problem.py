"""A call's tensors, and everything that follows from them before there is a plan: problem, kernel, format, degree."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import torch

from dfa_megatron import kernels
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import BlockKernel, Need, accumulator_dtype
from dfa_megatron.plan.cost.choose import automatic_degree
from dfa_megatron.plan.cost.hardware import (
    CPU_LOOPBACK,
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    H200_SOCKETS,
    Hardware,
    computing_with,
)
from dfa_megatron.plan.cost.profile import profile_named
from dfa_megatron.plan.language.geometry import Form
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.environment import Links
from dfa_megatron.runtime.execute.wire_format import Format
from dfa_megatron.runtime.rank_plan import Problem, Served
from dfa_megatron.runtime.request import Request

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class QKV(NamedTuple):
    """The tensors of every call: q (batch, rows, heads, head_dim), k and v with kv_heads, v with head_dim_v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def transformed() -> UnsupportedError:
    """Return the error for tensors of torch.func, which have no memory of their own."""
    return UnsupportedError(
        "attention under a transform of torch.func, or with is_grads_batched",
        "kernels and messages take tensors that lie in memory",
        "backward, or torch.autograd.grad for each gradient",
    )


def refuse_strangers(*qkv: object) -> None:
    """Refuse what is no tensor at all.

    Raises:
        UnsupportedError: names it.
    """
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{name} of type {type(x).__name__}", "it is no tensor", "torch.as_tensor")


def refuse_tensors(qkv: QKV) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        UnsupportedError: says which shapes, dtypes or devices, and what would fit.
    """
    q, k, v = qkv
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(shapes, "each must have 4 dimensions", "(batch, local_seq, heads, head_dim)")
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2] and q.shape[3] == k.shape[3]):
        raise UnsupportedError(
            shapes,
            "they do not fit together",
            "one batch and local_seq for all, one kv_heads for k and v, one head_dim for q and k",
        )
    if 0 in q.shape or 0 in v.shape:
        raise UnsupportedError(shapes, "nothing may be empty", "at least one token, head and channel per rank")
    if q.shape[2] % k.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} heads with {k.shape[2]} kv_heads",
            "heads must be a multiple of kv_heads",
            "for example equal counts",
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise UnsupportedError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype}",
            "all three must be one floating-point dtype",
            ", ".join(map(str, DTYPES)),
        )
    if q.device.type not in ("cpu", "cuda"):
        what, why = f"attention of tensors on {q.device}", "no kernel computes and no transport sends there"
        raise UnsupportedError(what, why, "tensors on a GPU, or on a CPU")
    if not q.device == k.device == v.device:
        raise UnsupportedError(
            f"devices {q.device}, {k.device}, {v.device}", "all three must be on one device", str(q.device)
        )


def problem_of(request: Request, ranks: int, qkv: QKV, over: Channel | None) -> Problem:
    """Return what the plan of a request depends on, for tensors like these on each of so many ranks.

    Fewer ranks than `over` has run a plan around which neighbours exchange heads.
    """
    shape, hardware = _timed_as(request, qkv, over)
    if over is not None:
        hardware = hardware.inside(over.size // ranks)
    return Problem(request.for_plan(), request.config.schedule, ranks, qkv.q.shape[1], shape, hardware)


def kernel_of(request: Request, forms: frozenset[Form], qkv: QKV) -> BlockKernel:
    """Return the kernel of a request if its calls have these forms.

    Raises:
        UnsupportedError: none serves.
    """
    return kernels.select(request.config.kernel, _need(request, forms, qkv))


def _need(request: Request, forms: frozenset[Form], qkv: QKV) -> Need:
    q, k, v = qkv
    return Need(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        forms=forms,
        deterministic=request.config.deterministic,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        softcap=request.softcap,
        alibi=request.alibi,
        packed=bool(request.cu_seqlens) or request.irregular,
    )


def _timed_as(request: Request, qkv: QKV, over: Channel | None) -> tuple[AttentionShape, Hardware]:
    """The shape and the machine that candidates are timed with. The kernel follows from the plan, so it is a guess."""
    forms: frozenset[Form] = frozenset({"full", "causal"} if request.window_size == (-1, -1) else {"full", "band"})
    kernel = kernels.first(request.config.kernel, _need(request, forms, qkv))
    shape = shape_of(request, qkv)
    if kernel is not None:
        shape = dataclasses.replace(shape, backward_needs=kernels.get(kernel).backward_needs)
    return shape, profile_of(request.config.hardware, qkv.q.is_cuda, over, kernel)


def shape_of(request: Request, qkv: QKV) -> AttentionShape:
    """Return the sizes by which the planner compares costs."""
    q, k, v = qkv
    return AttentionShape(
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        bytes_per_element=q.dtype.itemsize,
        accumulator_bytes=accumulator_dtype(q.dtype).itemsize,
        wire_bytes=_wire_dtype(request, q).itemsize,
    )


def _wire_dtype(request: Request, q: torch.Tensor) -> torch.dtype:
    """Of partial results while they travel."""
    return q.dtype if request.config.wire_dtype == "input" else accumulator_dtype(q.dtype)


def served_by(request: Request, qkv: QKV, forms: frozenset[Form], *, alone: bool) -> Served:
    """Return what the kernel of these forms asks for, on ranks with tensors like these; alone: nothing is sent.

    Raises:
        UnsupportedError: no kernel serves.
    """
    q, k, v = qkv
    kernel = kernel_of(request, forms, qkv)
    needs = "out" if alone and kernel.takes_out else kernel.backward_needs
    wire = _wire_dtype(request, q)
    sizes = Format(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, wire, needs)
    return Served(sizes, "band" in forms or kernel.refusal(_need(request, forms | {"band"}, qkv)) is None)


def degree_of(request: Request, qkv: QKV, over: Channel | None) -> int:
    """Return the degree of Ulysses to run with, 1 for no exchange of heads."""
    degree, hardware = request.config.ulysses_degree, request.config.hardware
    if isinstance(degree, int):
        return degree
    q = qkv.q
    if over is None or request.cu_seqlens or request.plan is not None or (hardware == "auto" and not q.is_cuda):
        return 1
    shape, machine = _timed_as(request, qkv, over)
    return automatic_degree(
        request.mask_over(over.size * q.shape[1]),
        over.size,
        schedule=request.config.schedule,
        layout=request.layout,
        shape=shape,
        hardware=machine,
    )


_named = lru_cache(maxsize=8)(profile_named)  # a file, read again for every new pack


def profile_of(hardware: str, cuda: bool, over: Channel | None, kernel: str | None) -> Hardware:
    """Return the machine that "auto" simulates: a CPU's loopback, one host with or without NVLink, or several hosts.

    Several hosts have adapters or sockets between them. The links are those that the ranks told each other.

    Args:
        hardware: the option of that name; a profile that it names overrides what the ranks see.
        cuda: the tensors are on GPUs.
        over: the channel of the ranks, None for one rank.
        kernel: computes the blocks, as far as it is known before there is a plan.

    Raises:
        UnsupportedError: there is no such profile or file, or the file is none.
    """
    if hardware != "auto":
        return computing_with(kernel, _named(hardware))
    if not cuda:
        return CPU_LOOPBACK
    hosts, (inside, network) = (1, Links()) if over is None else (over.hosts, over.links)
    if over is not None and (hosts > 1 or inside == "network"):
        nodes = 1 if inside == "network" else max(1, over.size // hosts)
        found = dataclasses.replace(H200_SOCKETS if network == "sockets" else H200_NIC_400G, ranks_per_node=nodes)
    else:
        found = H200_NVLINK if inside == "p2p" else H200_SLOW_LINK
    return computing_with(kernel, found)
