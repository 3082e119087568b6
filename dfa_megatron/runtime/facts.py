"""The facts on which ranks must agree about a prepared attention, and the kinds of its calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from dfa_megatron.runtime.agreement.calls import Facts, Kind
from dfa_megatron.runtime.cu_seqlens import describe
from dfa_megatron.runtime.execute import alibi_positions as alibi
from dfa_megatron.runtime.problem import Inputs
from dfa_megatron.runtime.request import OPTIONS, Request

if TYPE_CHECKING:
    from dfa_megatron.runtime.prepare import Prepared


def facts_of(prepared: Prepared, inputs: Inputs) -> Facts:
    """Return everything about which the ranks must agree, as text."""
    from dfa_megatron import __version__

    request = prepared.request
    facts = {f"request.{name}": repr(getattr(request, name)) for name in _COMPARED}
    facts |= {f"request.{name}": repr(getattr(request.config, name)) for name in OPTIONS}
    facts |= {f"shape of {name}": str(tuple(x.shape)) for name, x in zip("qkv", inputs[:3], strict=True)}
    return facts | {
        "request.cu_seqlens": describe(request.cu_seqlens),
        "request.mask": str(request.mask and request.mask.name),
        "request.plan": str(request.plan),
        "dtype": str(inputs.q.dtype),
        "alibi_slopes": alibi.describe(inputs.slopes),
        "plan": f"{prepared.rank_plan.schedule}, digest {prepared.rank_plan.digest}",
        "kernel": prepared.kernel.name,
        "torch": torch.__version__,
        "dfa_megatron": __version__,
    }


_COMPARED = ("causal", "softmax_scale", "window_size", "softcap", "sinks", "alibi", "deterministic", "layout")
"""Fields of a request that print in a few words."""


def kinds_of(facts: Facts, prepared: Prepared) -> tuple[Kind, Kind, Kind]:
    """What a forward, a backward, and a forward that no backward follows are, for ranks that compare their calls."""
    request, defaults = prepared.request, Request.__dataclass_fields__
    options = [f"{name}={value!r}" for name in _COMPARED if (value := getattr(request, name)) != defaults[name].default]
    if (degree := request.config.ulysses_degree) != "auto":
        options.append(f"ulysses_degree={degree}")
    if request.mask is not None or request.plan is not None:
        options.append(prepared.plan.forward.mask.name)
    packed = [describe(request.cu_seqlens)] if request.cu_seqlens else []
    shapes = ", ".join(f"{name} {facts[f'shape of {name}']}" for name in ("q", "k", "v"))
    text = ", ".join((shapes, facts["dtype"], facts["plan"].partition(",")[0], facts["kernel"], *options, *packed))
    compared = json.dumps(facts, sort_keys=True)
    forward, backward, alone = f"forward of {text}", f"backward of {text}", f"forward of {text}, requires_grad=False"
    return Kind.of(forward, compared), Kind.of(backward, compared), Kind.of(alone, compared)
