"""What one call asks for, and of which tensors: a frozen value, and text for the operator.

The operator takes only tensors and strings.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import LAYOUTS, nearest, plain
from dfa_megatron.plan.language.geometry import Span, Tile
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.language.layout import LAYOUTS as BY_LENGTH
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask, cross_documents, of_window
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.runtime.cu_seqlens import Offsets, balancing_mask, describe, mask_of
from dfa_megatron.runtime.execute.sinks import refuse_sinks

DEFAULTS = DistAttentionConfig()
OPTIONS = tuple(option.name for option in fields(DistAttentionConfig))
"""Attention's own: a framework's config has more."""
COMPARED = ("causal", "softmax_scale", "window_size", "softcap", "sinks", "deterministic", "layout")
"""Fields of a request that print in a few words."""

_most_heads = [255]
"""Of fewer tokens: more heads than models have are tokens."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_MASKS = "a value of dfa_megatron.masks, such as masks.documents([512, 1024]), or a union of rectangles with diagonals"


def check_config(config: object) -> None:
    """Refuse what is no config."""
    if not isinstance(config, DistAttentionConfig):
        instead = "DistAttentionConfig.from_mapping(...) of a dictionary"
        raise UnsupportedError(f"config={config!r}", "it must be a DistAttentionConfig", instead)


class Inputs(NamedTuple):
    """The tensors of one call.

    q (batch, rows, heads, head_dim), k and v with kv_heads, v with head_dim_v; sinks (heads,).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything about a distributed attention that is not a tensor or a group: the mathematics, and the options.

    Exactly one of causal (with window_size), mask and plan says which tokens attend to which.

    sinks: whether the call brings a sink for each head; the ranks must agree.
    deterministic: the same gradients to the bit from run to run, as torch.use_deterministic_algorithms asks.
    layout: the tokens that a rank holds, by a name or as a value.
    cu_seqlens: global token offsets of packed documents; empty for sequences that are one document each.
    """

    softmax_scale: float
    causal: bool | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    deterministic: bool = False
    mask: Mask | None = None
    plan: AttentionPlan | None = field(default=None, hash=False)  # thousands of blocks
    layout: str | Layout = "contiguous"
    cu_seqlens: Offsets = ()
    config: DistAttentionConfig = DEFAULTS

    def __post_init__(self) -> None:
        """Refuse values that no attention can have; a plan or a kernel refuses the rest."""
        check_config(self.config)
        if self.config.numerics == "invariant":
            object.__setattr__(self, "deterministic", True)
        for name in ("causal", "window_size", "softcap", "softmax_scale"):
            value = plain(getattr(self, name))
            value = float(value) if type(value) is int and name in ("softcap", "softmax_scale") else value
            object.__setattr__(self, name, tuple(value) if type(value) is list else value)
        self._check_mask()
        if type(self.softcap) is not float:
            raise UnsupportedError(f"softcap={self.softcap!r}", "it must be of type float", "0.0 for none")
        if type(self.softmax_scale) is not float or not 0 < self.softmax_scale < math.inf:
            why = "it is positive and finite" if type(self.softmax_scale) is float else "it must be of type float"
            raise UnsupportedError(f"softmax_scale={self.softmax_scale!r}", why, "None, which is head_dim ** -0.5")
        if not isinstance(self.layout, Layout) and self.layout not in LAYOUTS:
            raise UnsupportedError(f"layout={self.layout!r}", "there is no such layout", nearest(self.layout, LAYOUTS))

    def _check_mask(self) -> None:
        """Refuse a call without one definition of its mask, or with two."""
        window = self.window_size
        if type(window) is not tuple or [*map(type, window)] != [int, int] or min(window) < -1:
            why, instead = "it is the tokens to each side", "(left, right), each -1 for no bound or at least 0"
            raise UnsupportedError(f"window_size={window!r}", why, instead)
        ways = {
            "causal or window_size": self.causal is not None or window != (-1, -1),
            "mask": self.mask is not None,
            "plan": self.plan is not None,
        }
        given = [name for name, there in ways.items() if there]
        if len(given) > 1:
            raise UnsupportedError(" and ".join(given), "each says which tokens attend to which", "one of them alone")
        for name, value, kind, instead in (
            ("mask", self.mask, Mask, _MASKS),
            ("plan", self.plan, AttentionPlan, "one of dfa_megatron.make_plan"),
        ):
            if value is not None and type(value) is not kind:
                raise UnsupportedError(f"{name} of type {type(value).__name__}", f"it is no {kind.__name__}", instead)
        if self.given is None and self.causal is None:
            why, instead = "nothing says which tokens attend to which", "causal=True or causal=False, a mask or a plan"
            raise UnsupportedError("attention without causal, mask and plan", why, instead)
        if self.given is None and type(self.causal) is not bool:
            raise UnsupportedError(f"causal={self.causal!r}", "it must be of type bool", "True or False")

    @property
    def given(self) -> Mask | None:
        """The caller's own mask, or that of the caller's plan."""
        return self.mask if self.plan is None else self.plan.forward.mask

    def settled(self, ranks: int, rank: int, inputs: Inputs) -> tuple[Request, Mask, Layout]:
        """Return the request on such tensors of one of so many ranks, its mask, and the tokens that each rank holds.

        The request's layout is then a name where ranks hold equally many tokens by one, else a value. Tensors are
        refused that do not fit together, or do not have this rank's tokens.
        """
        refuse_tensors(inputs)
        if inputs.sinks is not None:
            refuse_sinks(inputs.sinks, inputs.q)
        queries, keys = inputs.q.shape[1], inputs.k.shape[1]
        asked, given = self.layout, self.given
        if isinstance(asked, Layout):
            first, length = asked.queries, asked.length
        elif given is not None:
            first, length = given.queries, given.length
        elif self.cu_seqlens:
            first, length = None, self.cu_seqlens[-1]
        else:
            first, length = (None if queries == keys else ranks * queries), ranks * queries
            length += 0 if first is None else ranks * keys
        mask = self.mask_over(length, first)
        layout = asked if isinstance(asked, Layout) else layout_of(asked, mask, ranks)
        if layout.ranks != ranks:
            why = f"{ranks} share the sequence"
            raise UnsupportedError(f"a layout of {layout.ranks} ranks", why, f"a layout of {ranks} ranks")
        if self.cu_seqlens and isinstance(asked, str) and queries != (share := layout.tokens(rank)):
            why = f"they are of all ranks together, of which layout {asked!r} gives this rank {share}"
            instead = "global offsets, the same on all ranks, and q, k and v cut by shard_sequence"
            raise UnsupportedError(f"cu_seqlens up to {length} with {queries} tokens on rank {rank}", why, instead)
        layout.check_tokens(rank, queries, "q")
        layout.check_tokens(rank, keys, "kv")
        name: str | Layout = layout
        if layout.queries is None and length == ranks * queries:
            same = (known for known, make in BY_LENGTH.items() if str(make(length, ranks)) == str(layout))
            name = asked if isinstance(asked, str) else next(same, layout)
        return replace(self, layout=name), mask, layout

    def mask_over(self, length: int, queries: int | None = None) -> Mask:
        """Return the mask over a whole sequence of that many tokens, or over two of which the first has `queries`.

        Documents, mask or plan of another length are refused, and a layout that needs documents.
        """
        given = self.given
        if given is not None and given.queries != queries:
            both = "of two sequences" if given.queries is not None else "of one sequence"
            why = "queries and keys are two sequences" if queries is not None else "queries and keys are one sequence"
            raise UnsupportedError(f"mask {given.name!r} {both}", why, "masks.cross and layouts.cross for two")
        if given is not None and given.length != length:
            what = f"a {'mask' if self.plan is None else 'plan'} over {given.length} tokens"
            why = f"the ranks hold {length} tokens together"
            raise UnsupportedError(what, why, f"one over {length} tokens, or other tensors")
        if given is not None and not given.tiles:
            raise UnsupportedError(f"mask {given.name!r}", "no token attends to any", "a mask with at least one pair")
        if self.cu_seqlens and queries is None:
            mask = mask_of(self.cu_seqlens, length, causal=bool(self.causal), window_size=self.window_size)
            balanced = self.layout == "load_balanced"
            return replace(mask, balanced_by=balancing_mask(self.cu_seqlens, length)) if balanced else mask
        if self.cu_seqlens:
            why, instead = "they say where documents of one sequence end", "mask=masks.cross_documents(...)"
            raise UnsupportedError("cu_seqlens with other keys than queries", why, instead)
        if given is not None:
            return given
        if self.layout == "load_balanced":
            why, instead = "the documents or the mask decide which rank holds a token", "cu_seqlens, a mask or a plan"
            raise UnsupportedError("layout 'load_balanced' without documents", why, instead)
        if queries is not None:
            window = self.window_size
            return cross_documents([queries], [length - queries], causal=bool(self.causal), window_size=window)
        return of_window(length, bool(self.causal), self.window_size)

    def facts(self, inputs: Inputs) -> dict[str, str]:
        """Return everything about which the ranks must agree before they plan, by name."""
        from dfa_megatron import __version__

        facts = {f"request.{name}": repr(getattr(self, name)) for name in COMPARED}
        facts |= {f"request.{name}": repr(getattr(self.config, name)) for name in OPTIONS}
        equal = isinstance(self.layout, str)  # else the layout says how many tokens each rank holds
        for name, x in zip("qkv", inputs[:3], strict=True):
            part = f"{x.shape[0]} sequences of {tuple(x.shape[2:])}"
            facts[f"shape of {name}"] = str(tuple(x.shape)) if equal else part
        return facts | {
            "request.cu_seqlens": describe(self.cu_seqlens) if self.cu_seqlens else "none",
            "request.mask": str(self.mask and self.mask.name),
            "request.plan": str(self.plan),
            "tokens of a rank": str(inputs.q.shape[1]) if equal else str(self.layout),
            "dtype": str(inputs.q.dtype),
            "torch": torch.__version__,
            "dfa_megatron": __version__,
        }

    def described(self, facts: dict[str, str]) -> str:
        """Return what a call of it is, for errors. facts: of `facts`, with the plan and the kernel."""
        defaults, options = self.__dataclass_fields__, list[str]()
        for name in COMPARED:
            if (value := getattr(self, name)) != defaults[name].default:
                options.append(f"{name}={value!r}")
        if (degree := self.config.ulysses_degree) != "auto":
            options.append(f"ulysses_degree={degree}")
        options += [] if self.given is None else [self.given.name]
        options += [describe(self.cu_seqlens)] if self.cu_seqlens else []
        shapes = ", ".join(f"{name} {facts[f'shape of {name}']}" for name in ("q", "k", "v"))
        return ", ".join((shapes, facts["dtype"], facts["plan"].partition(",")[0], facts["kernel"], *options))

    @property
    def verify(self) -> bool:
        """Whether the ranks compare their calls, and are watched."""
        return self.config.verify == "on"

    @property
    def invariant(self) -> bool:
        """Whether results merge in a fixed order, so that their bits do not depend on the ranks."""
        return self.config.numerics == "invariant"

    def to_text(self) -> str:
        """Return JSON; equal requests give equal text."""
        return to_text(**{name: getattr(self, name) for name in self.__dataclass_fields__})


def to_text(*, config: DistAttentionConfig, **values: Any) -> str:
    """Return JSON of the values of a request, which `from_text` checks; those that no request has are their repr."""
    values = {name: plain(value) for name, value in values.items()}
    values["config"] = {name: getattr(config, name) for name in OPTIONS}
    if isinstance(mask := values.get("mask"), Mask):
        values["mask"] = mask.name, mask.length, mask.tiles, mask.queries
    if isinstance(layout := values.get("layout"), Layout):
        values["layout"] = layout.chunks, layout.owner, layout.ranks, layout.queries
    if isinstance(plan := values.get("plan"), AttentionPlan):
        from dfa_megatron.plan.language import text  # which other requests need not load

        values["plan"] = text.to_text(plan)
    return json.dumps(values, sort_keys=True, default=lambda x: (x.lo, x.hi) if isinstance(x, Span) else repr(x))


@lru_cache(maxsize=256)
def from_text(text: str) -> Request:
    """Return the request that `to_text` wrote."""
    values: dict[str, Any] = json.loads(text)
    values["cu_seqlens"] = tuple(values.get("cu_seqlens", ()))
    if isinstance(values["mask"], list):
        name, length, tiles, queries = values["mask"]
        apart = tuple(Tile(Span(*q), Span(*kv), *band) for q, kv, *band in tiles)
        values["mask"] = Mask(name, length, apart, queries=queries)
    if isinstance(values["layout"], list):
        spans, owner, ranks, queries = values["layout"]
        values["layout"] = Layout(tuple(Span(*span) for span in spans), tuple(owner), ranks, queries)
    if values["plan"] is not None:
        from dfa_megatron.plan.language import text as plan_text

        values["plan"] = plan_text.from_text(values["plan"])
    values["config"] = DistAttentionConfig(**values["config"])
    return Request(**values)


def transformed() -> UnsupportedError:
    """Return the error for tensors of torch.func, which have no memory of their own."""
    return UnsupportedError(
        "attention under a transform of torch.func, or with is_grads_batched",
        "kernels and messages take tensors that lie in memory",
        "backward, or torch.autograd.grad for each gradient",
    )


def refuse_strangers(*qkv: object) -> None:
    """Refuse what is no tensor at all."""
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
    """Refuse tensors that do not fit together, and say what would."""
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
