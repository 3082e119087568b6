"""The public functions: exact attention over a sequence that is sharded across the ranks of a process group."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Never

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.leaf import outside_graphs, without_functions
from dfa_megatron.names import nearest
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.comm.channel import Channel, refuse
from dfa_megatron.runtime.comm.groups import Group, channel_of, group_name, group_size
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, check_offsets, offsets_of, rows_of
from dfa_megatron.runtime.op import DirectAttention, Pair, active_frame, attention, needs_gradient
from dfa_megatron.runtime.request import DEFAULTS, OPTIONS, Inputs, Request, refuse_strangers, to_text, transformed


def dist_flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mask: Mask | Sequence[Mask] | None = None,
    plan: AttentionPlan | None = None,
    return_lse: bool = False,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries over the whole sequence.

    Names follow flash-attn. Every rank holds as many tokens unless `layout`, `mask` or `plan` says otherwise. Exactly
    one of causal (with window_size), mask and plan says which tokens attend to which. Keys may be another sequence than
    queries, of another length. Causal and windows are then aligned to the ends, as in flash-attn.

    Args:
        q: (batch, local_seq, heads, head_dim), float64, float32, bfloat16 or float16.
        k: (batch, local_keys, kv_heads, head_dim); kv_heads divides heads and is never expanded on the wire.
        v: (batch, local_keys, kv_heads, head_dim_v).
        causal: whether a token sees only itself and the tokens before it. To be given unless mask or plan is.
        group: the ranks that share the sequence, in the order of their tokens: a process group, a one-dimensional
            DeviceMesh or a group's name. None: the default group, or a single process without torch.distributed.
        softmax_scale: of the scores; head_dim ** -0.5 if None.
        window_size: (left, right) tokens that a token sees beside itself, -1 for no bound.
        softcap: scores become softcap * tanh(scores / softcap); 0 leaves them as they are. Only the kernels
            `reference`, `triton` and `flash4` support it.
        sinks: (heads,), any floating dtype, the same values on every rank: a logit per query head that takes part in
            the softmax and has no value. Its gradient is that of this rank's rows: sum it over the group.
        mask: any mask of `dfa_megatron.masks` over the whole sequence, in its order; or a list of one for each row.
        plan: who computes what and when, as `make_plan` returns it, over the whole sequence and these ranks. It is
            checked before it runs.
        return_lse: also return lse.
        layout: the tokens a rank holds: "contiguous", "zigzag" (chunks r and 2P-1-r of 2P), "load_balanced" (by the
            work of the mask), or a value of `dfa_megatron.layouts`: numbers of tokens that differ, also none; keys of
            another sequence.
        config: how it is computed; see docs/options.md.

    Returns:
        out like q (with v's head_dim), and if asked lse (batch, heads, local_seq), the natural logarithm, in float32
        (float64 for float64), with the sinks in it. lse carries no gradient. A row that sees nothing has out 0.

    Raises:
        UnsupportedError: an argument has a value that it cannot have, this rank is no member of the group, or nothing
            serves the request; says what would work.
        PlanError: the plan is wrong; shows where.
        DisagreementError: the ranks ask for different things, or run different calls; AbsentError: one does not come.
        LostGroupError: an attention over this group has failed before.
        ExecutionError: a step failed; shows where.
    """
    out, lse = _attend(
        Inputs(q, k, v, sinks),
        group,
        config,
        unknown,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        mask=mask,
        plan=plan,
        layout=layout,
    )
    return (out, lse) if return_lse else out


def dist_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: CuSeqlens = (),
    *lengths: Never,
    causal: bool | None = None,
    group: Group = None,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    layout: str | Layout = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of this rank's queries, each over its own document of a pack that is sharded across ranks.

    Documents have any length from one token to the whole pack, and may begin, end and reach over ranks anywhere.
    Nothing is padded. Keys and values go only to ranks that attend to them. Every new `cu_seqlens` is planned and
    compared across the ranks once; the layers of a model share that.

    Args:
        q: (local_tokens, heads, head_dim); where the pack does not divide, the first ranks hold one token more.
        k: (local_tokens, kv_heads, head_dim).
        v: (local_tokens, kv_heads, head_dim_v).
        cu_seqlens: int32 (documents + 1), or as many Python integers: *global* token offsets 0, ..., tokens of all,
            the same on every rank. Best a tuple or a CPU tensor. A CUDA tensor is read back once, and the host waits.
            It is then known by its identity and version: a write through another tensor's `.data` is not seen.
            A list or tuple of as many for each row of a batch, where q, k, v are as in `dist_flash_attn_func`: the rows
            run as one pack, and the work of all of them is balanced together.
        causal, window_size: as in `dist_flash_attn_func`, within each document.
        layout: "load_balanced" as well: every rank computes its own rows, and the rows are placed for equal work.

    The other arguments, and the errors, are those of `dist_flash_attn_func`.

    Returns:
        out (local_tokens, heads, head_dim_v), and if asked lse (heads, local_tokens); of a batch those of all rows.

    Raises:
        UnsupportedError: also where `cu_seqlens` is no pack of these tokens; on the other ranks it is a
            DisagreementError with the same reason.
    """
    out, lse = _attend(
        Inputs(q, k, v, sinks),
        group,
        config,
        unknown or ("cu_seqlens_k",) * bool(lengths),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        layout=layout,
        cu_seqlens=cu_seqlens,
    )
    out, lse = (out.squeeze(0), lse.squeeze(0)) if q.dim() == 3 else (out, lse)
    return (out, lse) if return_lse else out


_DOCUMENTS = "cu_seqlens alone: global offsets of documents, the same for queries and keys; lengths follow from them"
_MASKS = "mask=, a value of dfa_megatron.masks"
_MEANT = {
    **dict.fromkeys(("dropout_p", "attention_dropout", "dropout"), "no dropout of attention, and dropout elsewhere"),
    **dict.fromkeys(("attn_mask", "attention_mask", "attn_bias", "bias", "block_mask", "score_mod"), _MASKS),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_k"), _DOCUMENTS),
    "alibi_slopes": "rotary embeddings, which turn q and k before the call; no kernel here adds a bias to scores",
    "is_causal": "causal=",
    **dict.fromkeys(("scale", "sm_scale"), "softmax_scale="),
    "enable_gqa": "leaving it out: k and v may have fewer heads",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    **dict.fromkeys(("process_group", "cp_group", "device_mesh", "mesh"), "group="),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse"), "return_lse="),
}
"""Arguments of other packages' functions, and what says the same here."""


def _unknown(names: Collection[str]) -> UnsupportedError:
    """Return the error for arguments that the functions do not have."""
    name = next(iter(names))
    known = tuple(x for x in inspect.signature(dist_flash_attn_func).parameters if x != "unknown")
    hint = f"config=DistAttentionConfig({name}=...)" if name in OPTIONS else nearest(name, known)
    hint = f"dist_flash_attn_func({name}=...), with the documents in it" if name in known else hint
    return UnsupportedError(f"the argument {name}", "these functions have none of that name", _MEANT.get(name, hint))


def _attend(inputs: Inputs, group: Group, config: DistAttentionConfig, unknown: Collection[str], **asked: Any) -> Pair:
    """Make the request of a call and run it: past PyTorch's dispatcher, unless a compiler or a mode listens there.

    unknown: names of arguments that there are not.
    """
    if asked["softmax_scale"] is None:
        width = inputs.q.shape[-1] if isinstance(inputs.q, torch.Tensor) and inputs.q.dim() else 0
        asked["softmax_scale"] = width**-0.5 if width else 1.0  # of a q that is refused below
    asked.update(
        sinks=inputs.sinks is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    if torch.compiler.is_compiling():
        return _traced(inputs, group, config, unknown, asked)
    over = channel_of(group, verify=getattr(config, "verify", "on") == "on")  # what is no config is refused below
    since = 0 if over is None else over.calls.last.number
    try:
        if unknown:
            raise _unknown(unknown)
        return _attend_over(inputs, group, over, config, asked)
    except Exception as error:  # of this rank alone, perhaps, and the others wait
        refuse(error, over, since)
        raise


def _attend_over(
    inputs: Inputs, group: Group, over: Channel | None, config: DistAttentionConfig, asked: dict[str, Any]
) -> Pair:
    """Attend in a sequence, in a pack, or in the rows of a batch that differ: these as in one sequence."""
    name = "cu_seqlens" if "cu_seqlens" in asked else "mask"
    rows = rows_of(asked[name], inputs.q) if name == "cu_seqlens" else asked[name]
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, Mask | tuple) for row in rows):
        from dfa_megatron.rows import join  # which other calls need not load

        whole, joined, layout = join(inputs, tuple(rows), asked["layout"], group_size(group))
        out, lse = _attend_whole(whole, group, over, config, asked | {name: joined, "layout": layout})
        sizes = inputs.q.shape[:2]
        return out[0].unflatten(0, sizes), lse[0].unflatten(1, sizes).transpose(0, 1)
    if name == "cu_seqlens":
        q, k, v, sinks = inputs
        asked[name] = offsets_of(asked[name], q.device)
        if not q.dim() == k.dim() == v.dim() == 3:
            shapes = f"packed q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            raise UnsupportedError(shapes, "each must have 3 dimensions", "(local_tokens, heads, head_dim)")
        if not asked[name]:
            check_offsets(())
        inputs = Inputs(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), sinks)
    return _attend_whole(inputs, group, over, config, asked)


def _attend_whole(
    inputs: Inputs, group: Group, over: Channel | None, config: DistAttentionConfig, asked: dict[str, Any]
) -> Pair:
    try:
        request = _request(repr(asked["window_size"]), config=config, **asked)
    except TypeError:  # a value without a hash
        request = Request(config=config, **asked)
    frame = active_frame()
    known = None if frame is None or frame.recording else frame.take()
    plain = _get_current_dispatch_mode() is None and type(inputs.q) in _PLAIN
    if not plain:
        refuse_strangers(inputs.q, inputs.k, inputs.v)
    if peek_interpreter_stack() is not None:
        raise transformed()
    trains = needs_gradient(inputs)
    if known is None and not plain:
        out, lse = attention(*inputs, request.to_text(), group_name(group), trains)
    else:
        with without_functions():
            out, lse = DirectAttention.apply(*inputs, request, over, trains, known, frame is None)  # type: ignore[no-untyped-call]
    if frame is not None and known is None:
        frame.record(out, lse)
    return out, lse


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_request = lru_cache(maxsize=256, typed=True)(lambda _window, **asked: Request(**asked))
"""The same object for equal calls: comparing it with itself takes no time. The window's text has its types."""

_attend_outside_graphs = outside_graphs(_attend)
"""For masks, documents, layouts and plans, which Dynamo cannot take as constants: a break in the graph."""


def _traced(
    inputs: Inputs, group: Group, config: DistAttentionConfig, unknown: Collection[str], asked: dict[str, Any]
) -> Pair:
    """Return the operator's results. Dynamo takes the options of a config as constants, but not a config."""
    given = any(asked.get(name) is not None for name in ("mask", "plan", "cu_seqlens"))
    if unknown or given or not isinstance(asked["layout"], str):
        out, lse = _attend_outside_graphs(inputs, group, config, unknown, **asked)
        return out, lse
    options = tuple(_constant(getattr(config, name)) for name in OPTIONS)
    if isinstance(window := asked["window_size"], tuple | list):
        asked["window_size"] = tuple(_constant(side) for side in window)
    for name in ("softmax_scale", "softcap"):
        asked[name] = _constant(asked[name])
    text = _text(options, **asked)
    out, lse = attention(*inputs, text, group_name(group), needs_gradient(inputs))
    return out, lse


def _constant(x: Any) -> Any:
    """Return x. Dynamo makes a constant of a number that is a key, of a symbol too, with a guard on its value."""
    if isinstance(x, float):
        x = x + 0.0  # Dynamo puts off what it has not touched, and then knows no constant
    (same,) = {x: None}
    return same


def _text(options: tuple[Any, ...], **asked: Any) -> str:
    return to_text(config=DistAttentionConfig(**dict(zip(OPTIONS, options, strict=True))), **asked)


_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # JSON is not traceable


class DistFlashAttention(nn.Module):
    """`dist_flash_attn_func` as a module without parameters.

    Attributes:
        group_name: of the group that was given. None where none was: every call then takes the default group there is,
            so a model may be built before its process groups.
        config: that was given. None where none was: the defaults, or those of a framework's own block.
    """

    def __init__(self, *, group: Group = None, config: DistAttentionConfig | None = None, **mathematics: Any) -> None:
        """Take the keywords of `dist_flash_attn_func`, but for sinks."""
        super().__init__()
        self.group_name: str | None = None if group is None else group_name(group)
        self.config, self.mathematics = config, mathematics

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See `dist_flash_attn_func`."""
        config = self.config or DEFAULTS
        return dist_flash_attn_func(q, k, v, sinks=sinks, group=self.group_name, config=config, **self.mathematics)

    def extra_repr(self) -> str:
        """Return the arguments that were given."""
        given = self.mathematics if self.config is None else {**self.mathematics, "config": self.config}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
