"""Small functions with the signatures of mamba-ssm, causal-conv1d, FLA and einops, that Megatron's layers call.

They go token by token, take and give states, and keep float64.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention

_CUTS: list[torch.Tensor] = []
"""Document numbers (1, seq) of calls that give none, while `cut` is active."""


@contextlib.contextmanager
def cut(offsets: Sequence[int]) -> Iterator[None]:
    """Cut every sequence at these offsets: Megatron's layers on one rank hand no documents to their kernels on CPUs."""
    _CUTS.append(torch.bucketize(torch.arange(offsets[-1]), torch.tensor(offsets[1:]), right=True)[None])
    try:
        yield
    finally:
        _CUTS.pop()


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None, **_: Any
) -> torch.Tensor:
    """causal-conv1d: x (batch, channels, seq), weight (channels, width), seq_idx (batch, seq)."""
    width, seq_idx = weight.shape[1], _CUTS[-1] if _CUTS else seq_idx
    idx = torch.zeros(x.shape[0], x.shape[2]) if seq_idx is None else seq_idx
    rows, ids = functional.pad(x, (width - 1, 0)), functional.pad(idx.float(), (width - 1, 0), value=-1)
    seen = zip(rows.unfold(2, x.shape[2], 1).unbind(2), ids.unfold(1, x.shape[2], 1).unbind(1), strict=True)
    taps = [row * (one == idx)[:, None] for row, one in seen]
    out = sum(tap * weight[:, at, None] for at, tap in enumerate(taps))
    out = out if bias is None else out + bias[:, None]
    return functional.silu(out) if activation in ("silu", "swish") else out


def mamba_chunk_scan_combined(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *_: int, **given: Any
) -> Any:
    """mamba-ssm: x (batch, seq, heads, width), dt (batch, seq, heads), B, C (batch, seq, groups, state).

    With seq_idx (batch, seq), the same in every row, the state that it returns is the last document's.
    """
    skip, z, state = (given.get(name) for name in ("D", "z", "initial_states"))
    ids = _CUTS[-1] if _CUTS else given.get("seq_idx")
    dt = functional.softplus(dt + given["dt_bias"]).clamp(*given.get("dt_limit", (0.0, torch.inf)))
    k, q = (mixed.repeat_interleave(x.shape[2] // mixed.shape[2], 2) for mixed in (B, C))
    ends = () if ids is None or ids[0, 0] == ids[0, -1] else _ends_of(ids)
    y, states = linear_attention(
        {"q": q, "k": k, "v": x * dt[..., None], "g": dt * A}, None if state is None else state.mT, ends
    )
    y = y + x * (skip if skip.dim() == 2 else skip[:, None])
    y = y if z is None else y * functional.silu(z)
    return (y, states[-1:].mT if ends else states.mT) if given.get("return_final_states") else y


def _ends_of(ids: torch.Tensor) -> tuple[int, ...]:
    """Return the offsets of documents from their numbers (batch, seq)."""
    return (0, *ids[0].unique_consecutive(return_counts=True)[1].cumsum(0).tolist())


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor, conv1d_weight: torch.Tensor, conv1d_bias: Any, dt_bias: Any, A: torch.Tensor, **given: Any
) -> torch.Tensor:
    """mamba-ssm: the projected (batch, seq, z + x + B + C + dt), as one kernel."""
    heads = len(A)
    width = given["headdim"] or given["D"].shape[1]
    inner = heads * width
    groups = (conv1d_weight.shape[0] - inner) // 2
    z, mixed, dt = zxbcdt.split([inner, inner + 2 * groups, heads], -1)
    mixed = causal_conv1d_fn(mixed.mT, conv1d_weight, conv1d_bias, given["seq_idx"], given["activation"]).mT
    x, b, c = mixed.split([inner, groups, groups], -1)
    x, z = x.unflatten(-1, (heads, width)), z.unflatten(-1, (heads, width))
    b, c = (mix.unflatten(-1, (given["ngroups"], -1)) for mix in (b, c))
    more = {"D": given["D"], "z": z, "dt_bias": dt_bias, "seq_idx": given["seq_idx"]}
    return mamba_chunk_scan_combined(x, dt, A, b, c, given["chunk_size"], **more).flatten(2)


class RMSNormGated(torch.nn.Module):
    """mamba-ssm: the norm of x * silu(z), in groups."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, **where: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=where.get("dtype")))

    def forward(self, x: torch.Tensor, z: Any = None) -> torch.Tensor:
        x = x if z is None else x * functional.silu(z)
        grouped = x.unflatten(-1, (-1, self.group_size))
        return (grouped * (grouped.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """As Megatron's subclass of it: cut over tensor-parallel ranks."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    """FLA."""
    return x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, Any]:
    """FLA: q, k (batch, seq, heads, key), v (batch, seq, heads, value), g and beta (batch, seq, heads).

    g of Kimi's has a value for each key.

    States are (documents, heads, key, value); with cu_seqlens the batch is one.
    """
    cu_seqlens = given.get("cu_seqlens")
    ends = _ends_of(_CUTS[-1]) if cu_seqlens is None and _CUTS else ()
    ends = ends if cu_seqlens is None else tuple(cu_seqlens.tolist())
    tokens = {"q": q * given.get("scale", k.shape[-1] ** -0.5), "k": k, "v": v, "g": g, "beta": beta}
    return delta_rule(tokens, given.get("initial_state"), ends)


def chunk_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, Any]:
    """FLA, with the gate inside: g (batch, seq, heads, key) becomes the logarithm of each key's decay."""
    rate = given["A_log"].exp()[:, None]
    g = g + given["dt_bias"].view(g.shape[2:])
    g = given["lower_bound"] * (rate * g).sigmoid() if given["safe_gate"] else -rate * functional.softplus(g)
    return chunk_gated_delta_rule(q, k, v, g, beta, **given)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, cu_seqlens: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """FLA: x (batch, seq, channels), weight (channels, width)."""
    idx = None
    if cu_seqlens is not None:
        idx = torch.bucketize(torch.arange(x.shape[1]), cu_seqlens[1:], right=True)[None]
    return causal_conv1d_fn(x.mT, weight, bias, idx, activation).mT, None


def rearrange(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """einops, as far as Megatron's Mamba mixer uses it in training."""
    done = {
        "l b d -> b l d": lambda: x.transpose(0, 1),
        "b l d -> l b d": lambda: x.transpose(0, 1),
        "d 1 w -> d w": lambda: x.squeeze(1),
        "(h p) -> h p": lambda: x.unflatten(0, (-1, sizes["p"])),
    }
    return done[pattern]()


def megatrons_stack() -> Any:
    """Return Megatron's class of hybrid stacks (called MambaStack in Megatron-Core 0.16)."""
    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack
    except ModuleNotFoundError:
        from megatron.core.ssm.mamba_block import MambaStack

        return MambaStack
    return HybridStack


@functools.cache
def install() -> None:
    """Put these functions where Megatron's mixers look for the packages'."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    here = globals()
    vars(sys.modules[megatrons_stack().__module__])["TENorm"] = WrappedTorchNorm
    vars(mamba_context_parallel)["HAVE_EINOPS"] = True
    for name in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "causal_conv1d_fn", "rearrange"):
        vars(mamba_mixer)[name] = here[name]
    vars(mamba_mixer).update(
        HAVE_MAMBA_SSM=True, HAVE_EINOPS=True, RMSNormGated=RMSNormGated, ExtendedRMSNorm=RMSNormGated
    )
    vars(mamba_mixer)["_check_mamba_sequence_packing_support"] = lambda **_: (True, None)
    from megatron.core.ssm import gated_delta_net

    homes: list[Any] = [gated_delta_net]
    with contextlib.suppress(ImportError):  # a package from Megatron-Core 0.19 on
        from megatron.core.ssm.gated_delta_net import common, gdn

        homes += [common, gdn]
    with contextlib.suppress(ImportError):  # in Megatron's development branch
        from megatron.core.ssm.gated_delta_net import kda

        vars(kda).update(chunk_kda=chunk_kda, HAVE_FLA_KDA=True)
        homes.append(kda)
    for home in homes:
        for name in ("chunk_gated_delta_rule", "l2norm", "causal_conv1d", "causal_conv1d_fn"):
            vars(home)[name] = here[name]
        vars(home)["HAVE_FLA"] = True
