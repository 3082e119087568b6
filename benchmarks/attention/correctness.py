"""The check that comes before any timing: a method's out, dq, dk and dv against dense attention in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from benchmarks.attention.job import Problem
from benchmarks.attention.method import Attention, Method
from dfa_megatron.doctor.dense import band_of, dense_attention
from dfa_megatron.doctor.world import World

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
    short = dataclasses.replace(problem, window=min(problem.window, length // 3))
    generator = torch.Generator(world.device).manual_seed(length + 100 * problem.heads + problem.kv_heads)
    drawn = tuple(
        torch.randn(
            (1, length, count, problem.head_dim),
            generator=generator,
            device=world.device,
            dtype=getattr(torch, problem.dtype),
        )
        for count in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    )
    exact = [x.double().requires_grad_() for x in drawn[:3]]
    out, _ = dense_attention(*exact, band_of(short.causal, short.window_size))
    gradients = torch.autograd.grad(out, exact, drawn[3].double())
    return Truth(short, drawn, (out.detach(), *gradients))


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
