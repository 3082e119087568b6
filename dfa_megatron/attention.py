"""The public functions: exact attention over a sequence that is sharded across the ranks of a process group."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.channel import Group, group_name
from dfa_megatron.runtime.op import Replay, attend
from dfa_megatron.runtime.request import Request


def dist_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    schedule: str = "auto",
    layout: str = "contiguous",
    ulysses_degree: int = 1,
    kernel: str = "auto",
    return_lse: bool = False,
    wire_dtype: str = "input",
    transport: str = "auto",
    cuda_graph: bool = False,
    verify: str = "once",
    agreement_timeout: float = 120.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries over the whole sequence.

    Names and keywords follow flash-attn. The sequence has P * local_seq tokens; every rank holds as many of them.

    Args:
        q: (batch, local_seq, heads, head_dim), float64, float32, bfloat16 or float16.
        k: (batch, local_seq, kv_heads, head_dim); kv_heads divides heads and is never expanded on the wire.
        v: (batch, local_seq, kv_heads, head_dim_v).
        group: the ranks that share the sequence, in the order of their tokens; None is the default group, and a single
            process if torch.distributed is not initialised.
        causal: a token sees itself and what is before it.
        softmax_scale: of the scores; head_dim ** -0.5 if None.
        window_size: (left, right) tokens that a token sees beside itself, -1 for no bound.
        softcap: must be 0; no kernel here caps scores yet.
        deterministic: the same gradients to the bit from run to run; on as well where torch's own switch
            (torch.use_deterministic_algorithms) is.
        schedule: "ring", "balanced", "balanced_shared", "zigzag" or "auto".
        layout: the tokens a rank holds: "contiguous", or "zigzag" (chunks r and 2P-1-r of 2P).
        ulysses_degree: ranks that exchange heads for tokens with their neighbours around the schedule, which then runs
            over P / ulysses_degree ranks with heads / ulysses_degree heads; it must divide both.
        kernel: "auto", or the name of one: see `dfa_megatron.kernels`.
        return_lse: also return lse.
        wire_dtype: "input" or "float32", of partial outputs and gradients between ranks.
        transport: "auto", "p2p" or "copy_engine": see docs/performance.md.
        cuda_graph: replay forward and backward as CUDA graphs; for sequences so short that launches decide.
        verify: when ranks compare what they run: "once" per new plan, "always", or "off".
        agreement_timeout: seconds to wait for the other ranks in that comparison.

    Returns:
        out like q (with v's head_dim), and if asked lse (batch, heads, local_seq), the natural logarithm, in float32
        (float64 for float64). lse carries no gradient.

    Raises:
        UnsupportedError: nothing serves the request; says what would work.
        DisagreementError: the ranks ask for different things.
        ExecutionError: a step failed; shows where.
    """
    if softcap:
        raise UnsupportedError(f"softcap={softcap}", "no kernel of this package caps scores yet", "softcap=0.0")
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    left, right = window_size
    request = _request_text(
        scale,
        causal,
        left,
        right,
        deterministic,
        schedule,
        layout,
        ulysses_degree,
        kernel,
        wire_dtype,
        transport,
        cuda_graph,
        verify,
        agreement_timeout,
    )
    out, lse = _attend(q, k, v, request, group_name(group))
    return (out, lse) if return_lse else out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator, or take its results from the frame of a checkpoint region."""
    frame = active_frame()
    if frame is not None and not frame.recording:
        out, lse = Replay.apply(q, k, v, *frame.take(), request, group)  # type: ignore[no-untyped-call]
        return out, lse
    out, lse = attend(q, k, v, request, group)
    if frame is not None:
        frame.record(out, lse)
    return out, lse


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]  # JSON is not traceable
def _request_text(
    softmax_scale: float,
    causal: bool,
    left: int,
    right: int,
    deterministic: bool,
    schedule: str,
    layout: str,
    ulysses_degree: int,
    kernel: str,
    wire_dtype: str,
    transport: str,
    cuda_graph: bool,
    verify: str,
    agreement_timeout: float,
) -> str:
    return _printed(
        Request(
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(left, right),
            schedule=schedule,
            layout=layout,
            ulysses_degree=ulysses_degree,
            kernel=kernel,
            deterministic=deterministic,
            wire_dtype=wire_dtype,
            transport=transport,
            cuda_graph=cuda_graph,
            verify=verify,
            agreement_timeout=agreement_timeout,
        )
    )


@lru_cache(maxsize=256)
def _printed(request: Request) -> str:
    return request.to_text()


def dist_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    schedule: str = "auto",
    layout: str = "contiguous",
    kernel: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Packed documents: reserved, and refused until they are planned.

    q (local_tokens, heads, head_dim); cu_seqlens int32 (documents + 1), global token offsets, the same on every rank.

    Raises:
        UnsupportedError: always, for now.
    """
    raise UnsupportedError(
        "attention over packed documents", "no kernel call for several documents exists yet", "dist_flash_attn_func"
    )


class DistFlashAttention(nn.Module):
    """`dist_flash_attn_func` as a module without parameters; the keywords are those of the function."""

    def __init__(self, *, group: Group = None, **options: object) -> None:
        super().__init__()
        self.group_name = group_name(group)
        self.options = options

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `dist_flash_attn_func`."""
        return dist_flash_attn_func(q, k, v, group=self.group_name, **self.options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
