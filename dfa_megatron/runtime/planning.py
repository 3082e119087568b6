"""Choose what serves a request on these tensors: the kernel, the machine that is simulated, the plan."""

from __future__ import annotations

import dataclasses

import torch

from dfa_megatron import kernels
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import BlockKernel, Need
from dfa_megatron.plan.cost.choose import make_plan
from dfa_megatron.plan.cost.hardware import (
    CPU_LOOPBACK,
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    H200_SOCKETS,
    Hardware,
    computing_with,
)
from dfa_megatron.plan.language.geometry import UNBOUNDED, Form, joined_spans
from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, AttentionPlan
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.leaves import LeafSizes
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.kernel_calls import Takes
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.environment import Links
from dfa_megatron.runtime.request import Inputs, Request


def kernel_of(
    request: Request, mask: Mask, ranks: int, inputs: Inputs
) -> tuple[BlockKernel, Sizes, Takes, LeafSizes | None]:
    """Choose the kernel of a request; return it, the sizes of the tensors, and what its launches take.

    The last are the sizes of chunks of a fixed order; None where results merge as they come.
    """
    q, k, v, *_ = inputs
    need = Need(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        forms=_forms_of(request, mask),
        deterministic=request.deterministic,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        softcap=request.softcap,
        packed=bool(request.cu_seqlens) or (request.given is not None and len(request.given.tiles) > 1),
        invariant=request.invariant,
    )
    kernel = kernels.select(request.config.kernel, need)
    bands = kernel.refusal(dataclasses.replace(need, forms=need.forms | {"band"})) is None
    takes = kernel.takes_of(q.shape[0], need.heads // need.kv_heads, bands=bands)
    # With a fixed order a rank alone does what several do.
    reads = "out" if ranks == 1 and kernel.takes_out and not need.invariant else kernel.backward_needs
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = Sizes(q.shape[0], need.heads, need.kv_heads, need.head_dim, need.head_dim_v, dtype, reads, need.invariant)
    return kernel, sizes, takes, kernel.leaves(need) if need.invariant else None


def degree_of(request: Request, mask: Mask, over: Channel | None, inputs: Inputs) -> int:
    """Return the number of neighbours that exchange heads; 1 where none do."""
    q, k, *_ = inputs
    if not isinstance(request.config.ulysses_degree, str):
        return request.config.ulysses_degree
    if over is None or not q.is_cuda or request.cu_seqlens or request.given is not None:
        return 1
    from dfa_megatron.plan.degree import automatic_degree  # which other calls need not load

    hardware = profile_of(q.is_cuda, over, "auto", over.size)
    found = automatic_degree(mask, over.size, q.shape[2], k.shape[2], request.config.schedule, hardware)
    return 1 if request.invariant and found > k.shape[2] else found


def plan_of(
    request: Request, mask: Mask, held: Layout, sizes: Sizes, hardware: Hardware, leaves: LeafSizes | None
) -> AttentionPlan:
    """Return the plan of a request, or refuse it; equal arguments give equal plans on every rank.

    `placed` proves the records of all ranks, and this rank's own program; a caller's plan is proved here as a whole.
    """
    schedule = request.config.schedule
    if request.invariant:
        from dfa_megatron.plan.schedules.invariant import invariant_plan  # which other calls need not load

        assert leaves is not None, "a kernel without leaves refuses this"
        if request.plan is not None:
            why = "a plan says itself what merges where"
            raise UnsupportedError("numerics='invariant' with a plan", why, "mask=, or numerics='fastest'")
        return invariant_plan(mask, held, leaves, schedule)
    if request.plan is not None:
        from dfa_megatron.plan.proof.check import check_plan

        _refuse_plan(request.plan, request, held)
        check_plan(request.plan, batch=sizes.batch)
        return request.plan
    return make_plan(mask, held.ranks, schedule=schedule, layout=request.layout, sizes=sizes, hardware=hardware)


def _refuse_plan(plan: AttentionPlan, request: Request, held: Layout) -> None:
    """Refuse a caller's plan that is not one of these ranks and tokens; `check_plan` then proves that it is right."""
    what, ranks, by = f"the plan {plan}", held.ranks, str(request.layout)
    if (plan.forward.phase, plan.backward.phase) != (FORWARD, BACKWARD) or plan.backward.mask != plan.forward.mask:
        why = "its phases are not a forward and the backward of the same mask"
        raise UnsupportedError(what, why, "both phases of one make_plan")
    for phase in (plan.forward, plan.backward):
        if phase.ranks != ranks:
            why = f"it is for {phase.ranks} ranks, and {ranks} share the sequence"
            raise UnsupportedError(what, why, f"make_plan(mask, {ranks})")
        if any(joined_spans(phase.layout.spans(rank)) != joined_spans(held.spans(rank)) for rank in range(ranks)):
            why = f"it places tokens by layout {plan.layout!r}, and the ranks hold them by {by!r}"
            raise UnsupportedError(what, why, f"layout={plan.layout!r} and tensors of such tokens")
    if (schedule := request.config.schedule) not in ("auto", plan.schedule):
        raise UnsupportedError(f"schedule={schedule!r} with a plan", "the plan says it", "schedule='auto'")


def _forms_of(request: Request, mask: Mask) -> frozenset[Form]:
    """Return the forms of all tiles that any rank may compute; all ranks choose the kernel by them.

    Ranks cut queries and keys at the same tokens. So a tile of a causal document is full or square causal again. A
    pack's forms do not depend on its documents: all packs of a job take one kernel.
    """
    if request.cu_seqlens:
        return frozenset({"full", "causal"} if request.window_size == (-1, -1) else {"full", "band"})
    found: set[Form] = {"full"}
    for tile in filter(None, (tile.shrink() for tile in mask.tiles)):
        if tile.form != "full":
            is_causal = tile.lo == -UNBOUNDED and tile.hi == 0 and tile.q == tile.kv
            found.add("causal" if is_causal else "band")
    return frozenset(found)


def profile_of(cuda: bool, over: Channel | None, kernel: str, ranks: int) -> Hardware:
    """Return the machine that "auto" simulates: a CPU's loopback, one host with or without NVLink, or several hosts.

    Several hosts have adapters or sockets between them. The links are those that the ranks told each other.
    ranks: of the plan; an equal number is on each host.
    """
    if not cuda:
        return CPU_LOOPBACK
    hosts, (inside, network) = (1, Links()) if over is None else (over.hosts, over.links)
    if over is not None and (hosts > 1 or inside == "network"):
        nodes = 1 if inside == "network" else max(1, ranks // hosts)
        found = dataclasses.replace(H200_SOCKETS if network == "sockets" else H200_NIC_400G, ranks_per_node=nodes)
    else:
        found = H200_NVLINK if inside == "p2p" else H200_SLOW_LINK
    return computing_with(kernel, found)
