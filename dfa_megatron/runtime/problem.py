"""What a request over some tensors asks for before there is a plan: a problem for the planner, a kernel, a format."""

from __future__ import annotations

import dataclasses

import torch

from dfa_megatron import kernels
from dfa_megatron.kernels.api import BlockKernel, Form, Need
from dfa_megatron.plan.cost.choose import automatic_degree
from dfa_megatron.plan.cost.hardware import Hardware
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.execute.wire_format import Format
from dfa_megatron.runtime.inputs import shape_of, wire_dtype
from dfa_megatron.runtime.machine import profile_of
from dfa_megatron.runtime.rank_plan import Problem
from dfa_megatron.runtime.request import Request


def problem_of(
    request: Request, ranks: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, over: Channel | None
) -> Problem:
    """What the plan of a request over such tensors, of each of so many ranks, depends on."""
    return Problem(request.for_plan(), ranks, q.shape[1], *_timed_as(request, q, k, v, over))


def kernel_of(
    request: Request, forms: frozenset[Form], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> BlockKernel:
    """The kernel of a request over such tensors, if calls have these forms.

    Raises:
        UnsupportedError: none serves.
    """
    return kernels.select(request.kernel, _need(request, forms, q, k, v))


def _need(request: Request, forms: frozenset[Form], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Need:
    return Need(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        forms=forms,
        deterministic=request.deterministic,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        softcap=request.softcap,
        alibi=request.alibi,
        packed=bool(request.cu_seqlens),
    )


def _timed_as(
    request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, over: Channel | None
) -> tuple[AttentionShape, Hardware]:
    """What plans of the request are timed as, and on; which kernel it is follows from the plan, so that is a guess."""
    forms: frozenset[Form] = frozenset({"full", "causal"} if request.window_size == (-1, -1) else {"full", "band"})
    kernel = kernels.first(request.kernel, _need(request, forms, q, k, v))
    shape = shape_of(request, q, k, v)
    if kernel is not None:
        shape = dataclasses.replace(shape, backward_needs=kernels.get(kernel).backward_needs)
    return shape, profile_of(request.hardware, q.is_cuda, over, kernel)


def format_of(request: Request, kernel: BlockKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Format:
    """The sizes and dtypes of what travels for such tensors."""
    wire = wire_dtype(request, q)
    return Format(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, wire, kernel.backward_needs)


def degree_of(request: Request, over: Channel | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Return the degree of Ulysses to run with, 1 for no exchange of heads."""
    if isinstance(request.ulysses_degree, int):
        return request.ulysses_degree
    if over is None or request.cu_seqlens or (request.hardware == "auto" and not q.is_cuda):
        return 1
    shape, hardware = _timed_as(request, q, k, v, over)
    mask = request.mask(over.size * q.shape[1])
    return automatic_degree(
        mask,
        over.size,
        schedule=request.schedule,
        layout=request.layout,
        shape=shape,
        hardware=hardware,
    )
