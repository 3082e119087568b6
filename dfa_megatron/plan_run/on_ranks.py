"""Run a plan, on ranks or in one process, and compare with dense attention in float64."""

from __future__ import annotations

import torch

from dfa_megatron import naive
from dfa_megatron.attention import dist_flash_attn_func
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.doctor.world import join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.schedules import plan_named
from dfa_megatron.plan_run.run_flags import TOLERANCE, RunFlags
from dfa_megatron.plan_run.together import backward_together, forward_together, prepare_together
from dfa_megatron.runtime.request import Request

RESULTS = ("out", "dq", "dk", "dv")


def one_rank(plan: AttentionPlan, flags: RunFlags) -> int:
    """Run as one of the plan's ranks; return the exit status.

    Raises:
        UnsupportedError: the number of ranks is not the plan's, or nothing serves the sizes.
    """
    world = join(flags.device)
    if world.size != plan.ranks:
        raise UnsupportedError(f"{world.size} ranks", f"the plan is for {plan.ranks}", f"{plan.ranks} ranks")
    mine = plan.forward.layout.positions(world.rank)
    given = [x.to(world.device) for x in _inputs(plan, flags)]
    want = [x[:, mine] for x in _truth(plan, given)]
    q, k, v, dout = (x[:, mine] for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dist_flash_attn_func(*leaves, plan=plan, layout=plan.layout, config=DistAttentionConfig(kernel=flags.kernel))
    assert isinstance(out, torch.Tensor)
    sums = world.sums(_errors([out, *torch.autograd.grad(out, leaves, dout)], want))
    status = _verdict(plan, flags, sums, quiet=world.rank > 0)
    world.leave()
    return status


def all_ranks(plan: AttentionPlan, flags: RunFlags) -> int:
    """Run all ranks of a plan in this process; return the exit status."""
    given = _inputs(plan, flags)
    rows = [plan.forward.layout.positions(rank) for rank in range(plan.ranks)]
    config = DistAttentionConfig(kernel=flags.kernel)
    request = Request(softmax_scale=flags.head_dim**-0.5, plan=plan, layout=plan.layout, config=config)
    q, k, v, dout = ([x[:, mine] for mine in rows] for x in given)
    prepared = prepare_together(request, q, k, v)
    out, lse = zip(*forward_together(prepared, q, k, v), strict=True)
    gradients = backward_together(prepared, dout, q, k, v, out, lse)
    want = _truth(plan, given)
    errors = [_errors([out[rank], *gradients[rank]], [x[:, mine] for x in want]) for rank, mine in enumerate(rows)]
    return _verdict(plan, flags, [sum(values) for values in zip(*errors, strict=True)])


def _inputs(plan: AttentionPlan, flags: RunFlags) -> list[torch.Tensor]:
    """Return q, k, v and dout of the whole sequence, the same on every rank."""
    torch.manual_seed(0)
    dtype = getattr(torch, flags.dtype)
    heads = flags.heads, flags.kv_heads, flags.kv_heads, flags.heads
    return [torch.randn(flags.batch, plan.forward.mask.length, h, flags.head_dim).to(dtype) for h in heads]


def _truth(plan: AttentionPlan, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return (out, dq, dk, dv) in float64, computed on one rank as one block."""
    dense, scale = plan_named("ring", plan.forward.mask, 1), given[0].shape[-1] ** -0.5
    q, k, v, dout = ([x.double().cpu()] for x in given)
    results = naive.forward(dense, q, k, v, scale)
    gradients = naive.backward(dense, dout, q, k, v, results, scale)
    return [results[0][0], *gradients[0]]


def _errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    """Return |got - want|^2 of each result, then |want|^2 of each."""
    pairs = [(a.detach().double().cpu(), b) for a, b in zip(got, want, strict=True)]
    return [float((a - b).square().sum()) for a, b in pairs] + [float(b.square().sum()) for _, b in pairs]


def _verdict(plan: AttentionPlan, flags: RunFlags, sums: list[float], quiet: bool = False) -> int:
    """Print the error of every result, and return the exit status."""
    off = [(error / (size or 1.0)) ** 0.5 for error, size in zip(sums[:4], sums[4:], strict=True)]
    right = all(each <= TOLERANCE[flags.dtype] for each in off)
    if not quiet:
        print(f"{plan}, digest {plan.digest}: every pair once, every result at its owner")
        shown = ", ".join(f"{name} {each:.1e}" for name, each in zip(RESULTS, off, strict=True))
        verdict = "right" if right else f"WRONG, above {TOLERANCE[flags.dtype]:.0e}"
        print(f"{flags.dtype} against dense float64, relative: {shown}: {verdict}")
    return 0 if right else 1
