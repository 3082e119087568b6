"""The public functions: exact attention over a sequence that is sharded across the ranks of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.agreement.guard import Guard
from dfa_megatron.runtime.comm.groups import Group, group_name
from dfa_megatron.runtime.cu_seqlens import check_offsets, offsets_of
from dfa_megatron.runtime.op import Replay, attend
from dfa_megatron.runtime.prepare import refuse
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
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    schedule: str = "auto",
    layout: str = "contiguous",
    ulysses_degree: int | str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
    wire_dtype: str = "input",
    transport: str = "auto",
    cuda_graph: bool = False,
    hardware: str = "auto",
    verify: str = "on",
    agreement_timeout: float = 120.0,
    stall_timeout: float = 1800.0,
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
        softcap: scores become softcap * tanh(scores / softcap); 0 leaves them as they are. The kernels `reference`,
            `triton` and `flash4` can.
        sinks: (heads,), any floating dtype, the same values on every rank: a logit per query head that takes part in
            the softmax and has no value, so that the probabilities of a row's tokens sum to less than 1. Its gradient
            is that of this rank's rows: sum it over the group as that of any parameter the ranks share.
        alibi_slopes: (heads,), float32, the same values on every rank: -slope * |i - j| is added to the (capped) score
            of tokens i and j of the whole sequence, wherever the ranks hold them. A constant: it may require no
            gradient. The kernels `reference` and `triton` can.
        deterministic: the same gradients to the bit from run to run; on as well where torch's own switch
            (torch.use_deterministic_algorithms) is.
        schedule: "ring", "balanced", "balanced_shared", "zigzag" or "auto".
        layout: the tokens a rank holds: "contiguous", or "zigzag" (chunks r and 2P-1-r of 2P).
        ulysses_degree: ranks that exchange heads for tokens with their neighbours around the schedule, which then runs
            over P / ulysses_degree ranks with heads / ulysses_degree heads; it must divide both. "auto" is 1
            unless the planner finds more clearly faster.
        kernel: "auto", or the name of one: see `dfa_megatron.kernels`.
        return_lse: also return lse.
        wire_dtype: "input" or "float32", of partial outputs and gradients between ranks.
        transport: "auto", "p2p" or "copy_engine": see docs/performance.md.
        cuda_graph: replay forward and backward as CUDA graphs; for sequences so short that launches decide.
        hardware: what "auto" compares costs on: a shipped profile's name, or a .json file of `doctor --profile`.
        verify: "on" compares every call across the ranks, and watches over the group; "off" compares nothing.
        agreement_timeout: seconds to wait for the other ranks to prepare the same attention.
        stall_timeout: seconds that a running attention waits for a rank without a sign of life; 0 for no limit.

    Returns:
        out like q (with v's head_dim), and if asked lse (batch, heads, local_seq), the natural logarithm, in float32
        (float64 for float64), with the sinks in it. lse carries no gradient. A row that sees nothing has out 0.

    Raises:
        UnsupportedError: an option has a value that it cannot have, this rank is no member of the group, or nothing
            serves the request; says what would work.
        DisagreementError: the ranks ask for different things, or run different calls; AbsentError: one does not come.
        LostGroupError: an attention over this group has failed before.
        ExecutionError: a step failed; shows where.
    """
    request = _request(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
        deterministic=deterministic,
        schedule=schedule,
        layout=layout,
        ulysses_degree=ulysses_degree,
        kernel=kernel,
        wire_dtype=wire_dtype,
        transport=transport,
        cuda_graph=cuda_graph,
        hardware=hardware,
        verify=verify,
        agreement_timeout=agreement_timeout,
        stall_timeout=stall_timeout,
    )
    out, lse = _attend(q, k, v, sinks, alibi_slopes, request, group_name(group))
    return (out, lse) if return_lse else out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    request: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator, or take its results from the frame of a checkpoint region."""
    frame = active_frame()
    if frame is not None and not frame.recording:
        out, lse = Replay.apply(q, k, v, sinks, slopes, *frame.take(), request, group)  # type: ignore[no-untyped-call]
        return out, lse
    out, lse = attend(q, k, v, sinks, slopes, request, group, replayed=frame is not None)
    if frame is not None:
        frame.record(out, lse)
    return out, lse


def _request(q: torch.Tensor, *, softmax_scale: float | None, deterministic: bool, **options: Any) -> str:
    """What both functions ask the operator for, as text."""
    text: str = _request_text(
        softmax_scale=softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        **options,
    )
    return text


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]  # JSON is not traceable
def _request_text(window_size: Any, **options: Any) -> str:
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    request = Request(window_size=window, **options)  # checked where it is prepared, so that every rank hears of it
    try:
        return _printed(request)
    except TypeError:  # a value that has no hash is no option's
        return request.to_text()


@lru_cache(maxsize=256)
def _printed(request: Request) -> str:
    return request.to_text()


@torch.compiler.disable(recursive=True)  # type: ignore[untyped-decorator,unused-ignore]  # a graph per pack would be compiled
def dist_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Sequence[int],
    *,
    group: Group = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    schedule: str = "auto",
    layout: str = "contiguous",
    ulysses_degree: int | str = "auto",
    kernel: str = "auto",
    return_lse: bool = False,
    wire_dtype: str = "input",
    transport: str = "auto",
    cuda_graph: bool = False,
    hardware: str = "auto",
    verify: str = "on",
    agreement_timeout: float = 120.0,
    stall_timeout: float = 1800.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries, each over its own document of a pack that is sharded across ranks.

    Documents have any length from one token to the whole pack, and may begin, end and reach over ranks as they like:
    nothing is padded, and what no token of a rank attends to is neither sent there nor computed.

    Args:
        q: (local_tokens, heads, head_dim), as many tokens on every rank.
        k: (local_tokens, kv_heads, head_dim).
        v: (local_tokens, kv_heads, head_dim_v).
        cu_seqlens: int32 (documents + 1), or as many Python integers: *global* token offsets 0, ..., P * local_tokens,
            the same on every rank. Best a tuple or a CPU tensor: a CUDA tensor is read back once, which makes the host
            wait for the device, and then known by its identity and version (writing to it through another tensor
            object's `.data` would go unseen).
        causal, window_size: as in `dist_flash_attn_func`, within each document.
        cuda_graph: a graph is captured for every new pack, so only for packs that come again.

    The other arguments are those of `dist_flash_attn_func`. Every new `cu_seqlens` is planned and compared across the
    ranks once; the layers of a model share that.

    Returns:
        out (local_tokens, heads, head_dim_v), and if asked lse (heads, local_tokens).

    Raises:
        UnsupportedError: `cu_seqlens` is no pack of these tokens, or nothing serves the request; on the other ranks it
            is a DisagreementError with the same reason.
        DisagreementError: the ranks ask for different things, or run different calls; AbsentError: one does not come.
        LostGroupError: an attention over this group has failed before.
        ExecutionError: a step failed; shows where.
    """
    name = group_name(group)
    try:
        offsets = offsets_of(cu_seqlens, q.device)
        if not q.dim() == k.dim() == v.dim() == 3:
            shapes = f"packed q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            raise UnsupportedError(shapes, "each must have 3 dimensions", "(local_tokens, heads, head_dim)")
        if not offsets:
            check_offsets(offsets)
    except UnsupportedError as error:
        refuse(error, name, Guard.of(verify, agreement_timeout, stall_timeout))
        raise
    request = _request(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
        deterministic=deterministic,
        schedule=schedule,
        layout=layout,
        ulysses_degree=ulysses_degree,
        kernel=kernel,
        wire_dtype=wire_dtype,
        transport=transport,
        cuda_graph=cuda_graph,
        hardware=hardware,
        verify=verify,
        agreement_timeout=agreement_timeout,
        stall_timeout=stall_timeout,
        cu_seqlens=offsets,
    )
    out, lse = _attend(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), sinks, alibi_slopes, request, name)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


class DistFlashAttention(nn.Module):
    """`dist_flash_attn_func` as a module without parameters; the keywords are those of the function.

    group_name: of the group that was given. None where none was: every call then takes the default group there is, so a
        model may be built before its process groups.
    """

    def __init__(self, *, group: Group = None, **options: object) -> None:
        super().__init__()
        self.group_name: str | None = None if group is None else group_name(group)
        self.options = options

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `dist_flash_attn_func`."""
        tensors: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes}
        return dist_flash_attn_func(q, k, v, group=self.group_name, **tensors, **self.options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
