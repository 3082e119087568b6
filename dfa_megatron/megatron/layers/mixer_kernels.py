"""The kernels that Megatron's mixers call, from mamba-ssm, causal-conv1d and FLA, over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from dfa_megatron.recurrence import Decay, Scan, dist_conv, dist_scan
from dfa_megatron.runtime.cu_seqlens import Offsets

Kernel = Callable[..., Any]


def convolution(
    run: Callable[[torch.Tensor, Offsets], torch.Tensor], x: torch.Tensor, width: int, **where: Any
) -> torch.Tensor:
    """Return a causal convolution of x (batch, tokens, channels); `where` has group, cu_seqlens, config."""
    return dist_conv(run, x, width, packs=True, **where)


def by_causal_conv1d(kernel: Kernel, weight: torch.Tensor, bias: Any, activation: str) -> Any:
    """Return causal-conv1d's function as `convolution` takes it; weight (channels, width)."""

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        ids = _ids(documents, x)
        # With ids the channels must lie next to each other, as they do in x.
        out: torch.Tensor = kernel(x=x.mT, weight=weight, bias=bias, seq_idx=ids, activation=activation)
        return out.mT

    return run


def by_fla(kernel: Kernel, weight: torch.Tensor, bias: Any, activation: str) -> Any:
    """Return FLA's convolution likewise."""

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        out: torch.Tensor = kernel(x=x, weight=weight, bias=bias, activation=activation, **_offsets(documents, x))[0]
        return out

    return run


def by_pytorch(weight: torch.Tensor, bias: Any) -> Any:
    """Return PyTorch's convolution with SiLU likewise, where causal-conv1d is not installed."""
    channels, width = weight.shape

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        parts = x.mT.split(_lengths(documents, x), 2)
        padded = [functional.pad(part, (width - 1, 0)) for part in parts]
        out = torch.cat([functional.conv1d(part, weight[:, None], bias, groups=channels) for part in padded], 2)
        return functional.silu(out).mT

    return run


def state_space(
    kernel: Kernel,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    fixed: dict[str, Any],
    **where: Any,
) -> torch.Tensor:
    """Return what mamba-ssm's mamba_chunk_scan_combined makes of the tokens of all ranks.

    Args:
        kernel: that function.
        x: (batch, tokens, heads, width); dt: (batch, tokens, heads), before its bias and softplus.
        b, c: (batch, tokens, groups, state).
        fixed: its A, D, dt_bias and chunk_size.
        where: group, cu_seqlens and config.
    """

    def run(
        tokens: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = None if state is None else state.mT.contiguous()
        given = {"initial_states": first, "seq_idx": _ids(documents, x), "return_final_states": True}
        named = {"A": fixed["A"], "B": tokens["b"], "C": tokens["c"], "D": fixed["D"], "dt_bias": fixed["dt_bias"]}
        parts = (tokens["x"].contiguous(), tokens["dt"].contiguous())
        y, final = kernel(*parts, **named, chunk_size=fixed["chunk_size"], dt_softplus=True, **given)
        return y, final.mT

    log = functional.softplus(dt.float() + fixed["dt_bias"]) * fixed["A"]
    tokens = {"x": x, "dt": dt, "b": b.contiguous(), "c": c.contiguous()}
    scan = Scan(run, keys="b", values="x", packs=True)
    return dist_scan(scan, tokens, decay=Decay(c, log), **where)[0]


def gated_delta_rule(kernel: Kernel, tokens: dict[str, torch.Tensor], **where: Any) -> torch.Tensor:
    """Return what FLA's chunk_gated_delta_rule makes of the tokens of all ranks.

    Args:
        kernel: that function.
        tokens: its q, k, v, g and beta.
        where: group, cu_seqlens and config.
    """

    def run(
        tokens: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [tokens[name].contiguous() for name in ("q", "k", "v")]
        gates = {name: tokens[name].contiguous() for name in ("g", "beta")}
        states = {"initial_state": state, "output_final_state": True}
        out, final = kernel(*parts, **gates, **states, **_offsets(documents, parts[0]))
        return out, final

    return dist_scan(Scan(run, keys="k", values="v", packs=True), tokens, **where)[0]


def _ids(documents: Offsets, x: torch.Tensor) -> torch.Tensor | None:
    """Return the number of every token's document, int32 (1, tokens), from 0 on; None without documents."""
    if not documents:
        return None
    lengths = torch.tensor(_lengths(documents, x))
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), lengths)[None].to(x.device)


def _offsets(documents: Offsets, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return FLA's argument for documents, int64 offsets; none without documents."""
    return {"cu_seqlens": torch.tensor(documents, device=x.device)} if documents else {}


def _lengths(documents: Offsets, x: torch.Tensor) -> list[int]:
    ends = documents or (0, x.shape[1])
    return [hi - lo for lo, hi in pairwise(ends)]
