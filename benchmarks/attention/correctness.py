"""The check that comes before any timing: a method's out, dq, dk and dv against dense attention in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.attention.failures import Failure, together
from benchmarks.attention.job import Problem
from benchmarks.attention.method import Attention, Method
from benchmarks.programs import Tensors, draw
from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.doctor.world import World
from dfa_megatron.plan.language.geometry import Band
from dfa_megatron.plan.language.mask import Mask

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}
"""Largest |got - exact| / |exact| (Frobenius norms over the whole sequence)."""

NAMES = ("out", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """A short sequence's q, k, v, dout and the exact out, dq, dk, dv, whole on every rank."""

    problem: Problem
    inputs: tuple[torch.Tensor, ...]
    wanted: tuple[torch.Tensor, ...]


def truth(problem: Problem, world: World) -> Truth:
    """Draw a sequence of 256 tokens a rank (32 on a CPU) and compute its attention as the definition says."""
    length = world.size * (256 if world.cuda else 32)
    seed, dtype = length + 100 * problem.heads + problem.kv_heads, getattr(torch, problem.dtype)
    sizes = problem.heads, problem.kv_heads, problem.head_dim
    drawn = draw(length, *sizes, seed, device=world.device, dtype=dtype)
    return truth_of(problem, drawn, band_of(problem.causal))


def truth_of(problem: Problem, drawn: Tensors, visible: Band | Mask) -> Truth:
    """Return drawn inputs with their attention."""
    return Truth(problem, drawn, exact_of(drawn, visible))


def exact_of(inputs: Sequence[torch.Tensor], visible: Band | Mask) -> tuple[torch.Tensor, ...]:
    """Return out, dq, dk and dv of q, k, v and dout (batch, tokens, heads, head_dim) in float64."""
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    out = dense_attention(*leaves, visible)[0]
    return out.detach(), *torch.autograd.grad(out, leaves, inputs[3].double())


def compared(method: Method, exact: Truth, world: World) -> tuple[float, str, str]:
    """Return the largest relative error, "wrong" or how it failed or "", and why; collective."""
    shares = together(world, partial(squares, method, exact, world))
    if isinstance(shares, Failure):
        return 0.0, shares.state, shares.why
    squared = shares.tolist()
    error, why = verdict(world.sums(squared) if world.size > 1 else squared, exact.problem.dtype)
    return error, "wrong" if why else "", why


def squares(method: Method, exact: Truth, world: World) -> torch.Tensor:
    """Return this rank's part of the squared relative errors of out, dq, dk and dv (4,), without waiting for the
    device.

    Raises:
        Exception: any error of the method.
    """
    inputs = [method.split(x, world).detach().contiguous() for x in exact.inputs]
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    with ExitStack() as stack:
        attend: Attention = method.start(exact.problem, q.shape[1], world, stack)
        with method.around():
            out = attend(q, k, v)
            if out.shape != q.shape:
                raise ValueError(f"out has shape {tuple(out.shape)}, not {tuple(q.shape)}")
            got = (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))
    found = []
    for mine, whole in zip(got, exact.wanted, strict=True):
        difference = mine.double() - method.split(whole, world)
        found.append((difference.norm() / whole.norm()) ** 2)
    return torch.stack(found)


def verdict(squared: list[float], dtype: str) -> tuple[float, str]:
    """Return the largest relative error from the sums over all ranks (0 if NaN), and why it is too large, or ""."""
    found = dict(zip(NAMES, (total**0.5 for total in squared), strict=True))
    wrong = too_far(found, TOLERANCE[dtype])
    largest = max((error for error in found.values() if math.isfinite(error)), default=0.0)
    return largest, f"{wrong} (at most {TOLERANCE[dtype]:.0e})" if wrong else ""


def too_far(errors: Mapping[str, float], tolerance: float) -> str:
    """Return which relative errors are larger than the tolerance, or "". A NaN is."""
    return ", ".join(f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= tolerance)
