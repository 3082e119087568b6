"""The problem of a plan: everything that a request and its tensors decide before there is one, the kernel among it."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dfa_megatron import kernels
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import Need, accumulator_dtype
from dfa_megatron.plan.cost.hardware import (
    CPU_LOOPBACK,
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    H200_SOCKETS,
    Hardware,
    computing_with,
)
from dfa_megatron.plan.language.geometry import UNBOUNDED, Form
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import AttentionShape
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.environment import Links
from dfa_megatron.runtime.execute.wire_format import Format
from dfa_megatron.runtime.request import Request

_most_heads = [255]
"""Of fewer tokens: more heads than models have are tokens."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """The tensors of one call.

    q (batch, rows, heads, head_dim), k and v with kv_heads, v with head_dim_v; sinks (heads,).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan and its programs follow from; equal problems give equal plans on every rank.

    asks: a request with defaults for fields on which no plan depends (see `Request.for_plan`). ranks: of the plan.
    length: tokens of the whole sequence, or of both.
    shape, hardware: "auto" decides by these. kernel: computes every block, on all ranks.
    bands: it takes windows that are neither full nor square causal. repeats: the query heads that have
    the same keys, if it copies keys that several segments of a call have, else 0. format: of messages.
    """

    asks: Request
    schedule: str
    ranks: int
    length: int
    shape: AttentionShape
    hardware: Hardware
    kernel: str
    bands: bool
    repeats: int
    format: Format

    @property
    def mask(self) -> Mask:
        """The mask over the whole sequence."""
        return self.asks.mask_over(self.length)


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
        if hasattr(x, "to_local"):  # a DTensor
            why = "each rank passes its own part as a plain tensor, and the functions send what is needed"
            raise UnsupportedError(f"{name} of type {type(x).__name__}", why, f"{name}.to_local(), sharded by tokens")


def allow_more_heads_than_tokens() -> None:
    """Take tensors of 256 heads and more on fewer tokens a rank, for the rest of this process; on every rank.

    Without it they are refused: heads before tokens, in PyTorch's order, look so.
    """
    _most_heads[0] = sys.maxsize


def refuse_tensors(inputs: Inputs) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        UnsupportedError: says which shapes, dtypes or devices, and what would fit.
    """
    q, k, v, *_ = inputs
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UnsupportedError(shapes, "each must have 4 dimensions", "(batch, local_seq, heads, head_dim)")
    if not (q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise UnsupportedError(
            shapes,
            "they do not fit together",
            "one batch for all, one local_seq and kv_heads for k and v, one head_dim for q and k",
        )
    if any(0 in (x.shape[0], *x.shape[2:]) for x in (q, k, v)):
        raise UnsupportedError(shapes, "only tokens may lack on a rank", "at least one sequence, head and channel")
    if q.shape[2] > max(q.shape[1], _most_heads[0]):
        why = "these are more heads than tokens, as if heads came before tokens, in PyTorch's order"
        instead = "(batch, local_seq, heads, head_dim): x.transpose(1, 2); else allow_more_heads_than_tokens()"
        raise UnsupportedError(shapes, why, instead)
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


def problem_of(request: Request, ranks: int, inputs: Inputs, over: Channel | None) -> Problem:
    """Return the problem of a request, for tensors like these on each of so many ranks.

    over: the channel of these ranks, or of a multiple of them.

    Raises:
        UnsupportedError: no kernel serves.
    """
    q, k, v, *_ = inputs
    length = request.length(ranks, q.shape[1])
    need = _need(request, inputs, length)
    kernel = kernels.select(request.config.kernel, need)
    shape = AttentionShape(
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        bytes_per_element=q.dtype.itemsize,
        accumulator_bytes=accumulator_dtype(q.dtype).itemsize,
        backward_needs=kernel.backward_needs,
    )
    needs = "out" if ranks == 1 and kernel.takes_out else kernel.backward_needs
    return Problem(
        request.for_plan(),
        request.config.schedule,
        ranks,
        length,
        shape,
        profile_of(q.is_cuda, over, kernel.name, ranks),
        kernel.name,
        kernel.refusal(dataclasses.replace(need, forms=need.forms | {"band"})) is None,
        shape.heads // shape.kv_heads if kernel.takes == "window" and shape.batch == 1 else 0,
        Format(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, needs),
    )


def _forms_of(request: Request, length: int) -> frozenset[Form]:
    """Return the forms of all tiles that any rank may compute; all ranks choose the kernel by them.

    Ranks cut queries and keys at the same tokens. So a tile of a causal document is full or square causal again. A
    pack's forms do not depend on its documents: all packs of a job take one kernel.
    """
    if request.cu_seqlens:
        return frozenset({"full", "causal"} if request.window_size == (-1, -1) else {"full", "band"})
    found: set[Form] = {"full"}
    for tile in filter(None, (tile.shrink() for tile in request.mask_over(length).tiles)):
        if tile.form != "full":
            is_causal = tile.lo == -UNBOUNDED and tile.hi == 0 and tile.q == tile.kv
            found.add("causal" if is_causal else "band")
    return frozenset(found)


def _need(request: Request, inputs: Inputs, length: int) -> Need:
    q, k, v, *_ = inputs
    return Need(
        device=q.device.type,
        dtype=q.dtype,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        forms=_forms_of(request, length),
        deterministic=request.deterministic,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        softcap=request.softcap,
        packed=bool(request.cu_seqlens) or request.irregular,
    )


def profile_of(cuda: bool, over: Channel | None, kernel: str, ranks: int) -> Hardware:
    """Return the machine that "auto" simulates: a CPU's loopback, one host with or without NVLink, or several hosts.

    Several hosts have adapters or sockets between them. The links are those that the ranks told each other.

    Args:
        cuda: the tensors are on GPUs.
        over: the channel of the ranks, None for one rank.
        kernel: computes the blocks.
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
